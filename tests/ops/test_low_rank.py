"""What a change sees of its inputs, and what it adds up to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.ops.low_rank import LowRankWeight


def weight(key=None, dropout: float = 0.25, *, dtype: str = "float32") -> LowRankWeight:
    rng = np.random.default_rng(0)
    shapes = (2, 5, 3, 4), (2, 6, 3, 4), (2, 5, 6)
    base, a, b = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    return LowRankWeight(base, a, b, key, scale=0.5, dropout=dropout)


def test_without_a_key_or_a_share_to_drop_all_inputs_are_seen():
    x = jnp.ones((2, 3))
    assert weight(None).seen(x) is x
    assert weight(jax.random.key(0), dropout=0.0).seen(x) is x


def test_dropout_leaves_out_its_share_and_keeps_the_mean():
    x = jnp.arange(1.0, 200001.0)
    seen = np.asarray(weight(jax.random.key(0)).seen(x))
    dropped = seen == 0
    assert abs(dropped.mean() - 0.25) < 0.005
    np.testing.assert_allclose(seen[~dropped], np.asarray(x)[~dropped] / 0.75, rtol=1e-6)
    assert abs(seen.mean() / float(x.mean()) - 1) < 0.005
    assert jnp.asarray(weight(jax.random.key(0)).seen(x.astype("bfloat16"))).dtype == jnp.bfloat16


def test_the_merged_weight_is_the_sum_of_every_repeat_over_several_axes(x64):
    one = weight(dtype="float64")
    expected = one.base + 0.5 * np.einsum("lor,lrhi->lohi", one.b, one.a)
    np.testing.assert_allclose(one.merged(), expected, rtol=1e-13, atol=1e-13)
    alone = jax.tree.map(lambda array: array[1], one)
    np.testing.assert_allclose(alone.merged(), expected[1], rtol=1e-13, atol=1e-13)


def test_merging_rounds_once_to_the_dtype_of_the_weight():
    one = weight()
    narrow = LowRankWeight(one.base.astype("bfloat16"), one.a, one.b, None, one.scale, one.dropout)
    wide = LowRankWeight(narrow.base.astype("float32"), one.a, one.b, None, one.scale, one.dropout)
    assert narrow.merged().dtype == jnp.bfloat16
    np.testing.assert_array_equal(narrow.merged(), wide.merged().astype("bfloat16"))


def test_it_is_read_as_a_whole():
    one = weight()
    assert one[...] is one
    with pytest.raises(TypeError, match="as a whole"):
        one[0]  # pyright: ignore[reportArgumentType]
