"""A change beside a weight adds its product, on either side of the heads."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.nn.projection import merge_heads, project
from qwen35_jax.ops.low_rank import LowRankWeight

EMBED, HEADS, DIM, RANK = 5, 3, 4, 2


def weight(*shapes: tuple[int, ...]) -> LowRankWeight:
    rng = np.random.default_rng(0)
    base, a, b = (jnp.asarray(rng.standard_normal(shape)) for shape in shapes)
    return LowRankWeight(base, a, b, None, scale=0.5, dropout=0.0)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_products_with_a_change_are_those_with_the_merged_weight(x64, dtype):
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 7, EMBED)), dtype)
    y = jnp.asarray(np.random.default_rng(2).standard_normal((2, 7, HEADS, DIM)), dtype)
    out_of = weight((HEADS, DIM, EMBED), (RANK, EMBED), (HEADS, DIM, RANK))
    into = weight((EMBED, HEADS, DIM), (RANK, HEADS, DIM), (EMBED, RANK))
    bound = 1e-12 if dtype == "float64" else 0.1
    for found, expected in (
        (project(x, out_of), project(x, out_of.merged())),
        (merge_heads(y, into), merge_heads(y, into.merged())),
    ):
        assert found.dtype == expected.dtype == dtype
        np.testing.assert_allclose(
            found.astype("float64"), expected.astype("float64"), atol=bound, rtol=bound
        )
