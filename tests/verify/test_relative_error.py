"""The measure of `qwen35 verify`, which is the same in a program and on the host."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.verify.relative_error import relative_error
from qwen35_jax.verify.report import Errors, note_worst


@pytest.fixture(params=[jnp, np], ids=["jax", "numpy"])
def error(request):
    """The measure in a program and on the host, of one array or of several."""
    library = request.param

    def measure(*pairs) -> float:
        ours, reference = (
            [library.asarray(array, "float32") for array in side] for side in zip(*pairs, strict=True)
        )
        return float(relative_error(ours, reference, library=library))

    return measure


def test_error_is_the_largest_difference_over_the_largest_reference_value(error):
    assert error(([1.0, -8.0], [1.5, -10.0])) == pytest.approx(0.2)


def test_each_array_has_its_own_scale_and_the_worst_counts(error):
    assert error(([100.0], [101.0]), ([[0.3]], [[0.2]])) == pytest.approx(0.5)


def test_where_the_reference_is_zero_any_difference_counts_in_full(error):
    assert error(([0.0, 0.0], [0.0, 0.0])) == 0
    assert error(([0.0, 3.0], [0.0, 0.0])) == 3


def test_no_values_are_no_error(error):
    assert error((np.zeros((2, 0, 4)), np.zeros((2, 0, 4)))) == 0


@pytest.mark.parametrize("pair", [(np.nan, 1.0), (1.0, np.nan)])
def test_nan_on_either_side_is_nan_and_stays_through_merging(error, pair):
    found = error(([pair[0], 2.0], [pair[1], 2.0]), ([1.0], [1.0]))
    assert np.isnan(found)
    worst = Errors(nodes={"gdn.core": 1.0}, end_to_end={"decode": 0.0})
    worst.merge(Errors(nodes={"gdn.core": found}))
    worst.merge(Errors(nodes={"gdn.core": 2.0}))
    assert np.isnan(worst.worst_node)


def test_shapes_that_would_broadcast_are_refused(error):
    with pytest.raises(ValueError, match="shape"):
        error((np.ones((2, 1)), np.ones((2, 3))))


def test_on_the_host_no_digit_of_the_reference_is_lost():
    """Against float64 the sum of our rounding is the error, not that of the reference's cast."""
    ours = np.asarray([1.0], "bfloat16")
    assert relative_error([ours], [np.asarray([1.0 + 1e-12])], library=np) == pytest.approx(1e-12, rel=1e-3)


def test_the_larger_error_is_kept():
    worst: dict[str, float] = {}
    for value in (1.0, 3.0, 2.0):
        note_worst(worst, "embed", value)
    assert worst == {"embed": 3.0}
