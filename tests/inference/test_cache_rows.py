"""Rows of a cache taken anew: all that a row remembers comes along, bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.cache import AttentionCache, Cache, DeltaNetCache
from qwen35_jax.inference.cache_rows import take_rows
from qwen35_jax.sharding.rules import LogicalAxes, cache_axes
from tests.small_text_model import SmallModel, document, small_model


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest) -> SmallModel:
    return small_model(request.param)


@pytest.fixture(scope="module")
def cache(model: SmallModel) -> Cache:
    """Rows that have read texts of different lengths."""
    rows = [[document(1, 30)], [document(2, 9)], [document(3, 17)]]
    return model.prefill(rows, model.new_cache())[1]


def rows_of(cache: Cache) -> list[list[bytes]]:
    """Of every array the bits of each row, wherever the sharding rules say that its batch is."""
    axes = jax.tree.leaves(cache_axes(cache), is_leaf=lambda node: isinstance(node, LogicalAxes))
    return [
        [np.take(np.asarray(leaf), row, one.names.index("batch")).tobytes() for row in range(3)]
        for leaf, one in zip(jax.tree.leaves(cache), axes, strict=True)
    ]


def test_b38_every_array_has_its_rows_taken_bit_for_bit(cache: Cache) -> None:
    kinds = {type(layer) for group in cache.groups for layer in group}
    assert kinds == {DeltaNetCache, AttentionCache}
    index = [2, 0, 0]
    taken = jax.jit(take_rows)(cache, jnp.asarray(index))
    assert jax.tree.structure(taken) == jax.tree.structure(cache)
    for before, after in zip(rows_of(cache), rows_of(taken), strict=True):
        assert len(set(before)) == 3  # rows that cannot be told apart would prove nothing
        assert after == [before[row] for row in index]
    assert taken.lengths.tolist() == [17, 30, 30] and taken.capacity == cache.capacity


def test_a_batch_may_be_widened_and_narrowed_and_goes_on_as_its_rows_would(
    model: SmallModel, cache: Cache
) -> None:
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(cache)]
    one = take_rows(cache, jnp.asarray([1]))
    assert one.lengths.tolist() == [9]
    again = take_rows(one, jnp.asarray([0, 0, 0]))
    expected, _ = model.step([5, 5, 5], jax.tree.map(jnp.copy, cache))
    found, _ = model.step([5, 5, 5], again)
    bound = 1e-5 if model.dtype == "float32" else 2e-2
    np.testing.assert_allclose(found, expected[[1, 1, 1]], atol=bound * np.abs(expected).max())
    assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(cache)] == leaves
