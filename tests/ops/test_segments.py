"""Segments: where a row is cut, and what position each token has."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35_jax.ops.segments import positions, segment_index, segment_starts

TIME = 12


def walk(ids: list[int], offset: int = 0) -> tuple[list[bool], list[int], list[int]]:
    """Starts, indices and positions of one row, token by token."""
    starts, indices, places = [], [], []
    index, place, id_before = 0, offset, None
    for token_id in ids:
        cut = token_id != 0 and id_before is not None and token_id != id_before
        if cut:
            index, place = index + 1, 0
        starts.append(cut)
        indices.append(index)
        places.append(place)
        if token_id != 0:
            place, id_before = place + 1, token_id
    return starts, indices, places


@st.composite
def rows(draw: st.DrawFn) -> list[int]:
    """A row of TIME tokens: documents of length 1 and more, padding before, between and after them."""
    ids: list[int] = []
    while len(ids) < TIME:
        ids += [0] * draw(st.integers(0, 3))
        before = next((i for i in reversed(ids) if i), 0)
        ids += [draw(st.sampled_from(sorted(set(range(1, 9)) - {before})))] * draw(st.integers(1, 5))
    return ids[:TIME] if draw(st.booleans()) else [*ids[: TIME - 2], 0, 0]


all_of_a_row = jax.jit(
    lambda ids, offset: (segment_starts(ids), segment_index(ids), positions(ids), positions(ids, offset))
)


@settings(max_examples=50)
@given(st.lists(rows(), min_size=3, max_size=3), st.lists(st.integers(0, 99), min_size=3, max_size=3))
def test_starts_indices_and_positions_equal_a_walk_over_the_tokens(ids: list[list[int]], offset: list[int]):
    starts, index, places, continued = all_of_a_row(np.array(ids, np.int32), np.array(offset, np.int32))
    real = np.array(ids) != 0
    walked = [walk(row) for row in ids]
    np.testing.assert_array_equal(starts, [row[0] for row in walked])
    np.testing.assert_array_equal(index, [row[1] for row in walked])
    np.testing.assert_array_equal(places[real], np.array([row[2] for row in walked])[real])
    walked = [walk(row, at) for row, at in zip(ids, offset, strict=True)]
    np.testing.assert_array_equal(continued[real], np.array([row[2] for row in walked])[real])
    assert (np.array(places) >= 0).all() and (np.array(continued) >= 0).all()


def test_b10_positions_restart_at_every_document_whatever_its_number():
    ids = jnp.array([[1, 1, 1, 2, 2, 2, 2, 0]])
    np.testing.assert_array_equal(positions(ids)[0, :7], [0, 1, 2, 0, 1, 2, 3])


def test_first_segment_continues_the_cache_and_later_ones_do_not():
    ids = jnp.array([[0, 0, 7, 7, 0, 3, 3], [5, 5, 5, 5, 5, 5, 5]])
    places = positions(ids, jnp.array([40, 11]))
    np.testing.assert_array_equal(places[0, [2, 3, 5, 6]], [40, 41, 0, 1])
    np.testing.assert_array_equal(places[1], np.arange(11, 18))
    assert not segment_starts(ids)[0, 2]


@pytest.mark.parametrize("time", [1, 5])
def test_row_of_padding_has_no_start(time: int):
    ids = jnp.zeros((2, time), jnp.int32)
    assert not segment_starts(ids).any()
    assert not segment_index(ids).any()
    assert (positions(ids, jnp.array([0, 3])) >= 0).all()
