"""The measure of `qwen35 verify`. The nodes themselves are tested with the golden files and in tests/reference."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.verify.nodes import pad_past, relative_error
from qwen35_jax.verify.report import Errors, note_worst


def error(ours, reference) -> float:
    return float(relative_error([jnp.asarray(ours)], [np.asarray(reference)]))


def test_error_is_the_largest_difference_over_the_largest_reference_value():
    assert error([1.0, -8.0], [1.5, -10.0]) == pytest.approx(0.2)


def test_each_array_has_its_own_scale_and_the_worst_counts():
    ours = [jnp.array([100.0]), jnp.array([0.3])]
    reference = [jnp.array([101.0]), jnp.array([0.2])]
    assert float(relative_error(ours, reference)) == pytest.approx(0.5)


def test_where_the_reference_is_zero_any_difference_counts_in_full():
    assert error([0.0, 0.0], [0.0, 0.0]) == 0
    assert error([0.0, 3.0], [0.0, 0.0]) == 3


def test_no_values_are_no_error():
    assert error(np.zeros((2, 0, 4)), np.zeros((2, 0, 4))) == 0


@pytest.mark.parametrize("pair", [(np.nan, 1.0), (1.0, np.nan)])
def test_nan_on_either_side_is_nan_and_stays_through_merging(pair):
    found = error([pair[0], 2.0], [pair[1], 2.0])
    assert np.isnan(found)
    worst = Errors(nodes={"gdn.core": 1.0}, end_to_end={"decode": 0.0})
    worst.merge(Errors(nodes={"gdn.core": found}))
    worst.merge(Errors(nodes={"gdn.core": 2.0}))
    assert np.isnan(worst.worst_node)


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match="shape"):
        error(np.ones((2, 1)), np.ones((2, 3)))


def test_the_larger_error_is_kept():
    worst: dict[str, float] = {}
    for value in (1.0, 3.0, 2.0):
        note_worst(worst, "embed", value)
    assert worst == {"embed": 3.0}


def test_past_is_padded_behind_and_other_values_are_left_alone():
    record = {"past_k": np.ones((2, 3, 1, 4)), "past_v": np.ones((2, 3, 1, 4)), "gate": np.ones((2, 3))}
    padded = pad_past(record, 5)
    assert padded["past_k"].shape == padded["past_v"].shape == (2, 5, 1, 4)
    assert not padded["past_k"][:, 3:].any()
    assert padded["past_k"][:, :3].all()
    assert padded["gate"] is record["gate"]
