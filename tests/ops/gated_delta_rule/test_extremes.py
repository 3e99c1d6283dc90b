"""Decays at the ends of what a float holds: nothing overflows, nothing is wiped, every gradient is finite."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.ops.gated_delta_rule.chunk import split_cumsum
from tests.ops.gated_delta_rule.oracle import (
    NAMES,
    example,
    gradients,
    loop,
    relative_error,
    run,
    values,
    weights_for,
)

METHODS = ("recurrent", "chunked", "associative")
SHAPE = {"batch": 2, "time": 37, "key_heads": 3, "group": 2, "key_dim": 16, "value_dim": 12}
ONE_SEGMENT = np.ones((2, 37), np.int32)


def with_decay(tokens, dtype=np.float32):
    """Inputs whose log decays start with the given numbers and are 0 after them."""
    arrays = example(14, **SHAPE, dtype=dtype)
    arrays["log_decay"] = np.zeros_like(arrays["log_decay"])
    arrays["log_decay"][:, : len(tokens)] = np.asarray(tokens)[:, None]
    return arrays


CASES = {
    "down and up again": [-30, 30],
    "one deep step, then a chunk without decay": [-90],
    "sum of -200 within a chunk, then fresh keys": [-50] * 4,
    "sum of -2000 within a chunk, then weak decay": [-500] * 4 + [-0.01] * 30,
    "below what exp can tell from 0": [-0.1, -1e6, -0.1, -3e38, -0.1],
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES)
def test_b14_state_and_late_keys_survive_large_decays(case, method):
    arrays = with_decay(CASES[case])
    expected = loop(**arrays)
    for x, y in zip(values(arrays, ONE_SEGMENT, method=method), expected, strict=True):
        assert relative_error(x, y) < 1e-5
    found = gradients(arrays, weights_for(arrays, 14), ONE_SEGMENT, method=method)
    assert all(np.all(np.isfinite(found[name])) for name in NAMES)


@pytest.mark.parametrize("method", METHODS)
def test_b14_a_state_factor_of_one_is_one_between_factors_far_from_it(x64, method):
    arrays = with_decay([-90, 90], np.float64)
    for x, y in zip(values(arrays, ONE_SEGMENT, method=method), loop(**arrays), strict=True):
        assert relative_error(x, y) < 1e-12
    arrays["beta"] = np.zeros_like(arrays["beta"])  # nothing is written: the state only fades and comes back
    _, state = values(arrays, ONE_SEGMENT, method=method)
    np.testing.assert_allclose(state, arrays["initial_state"], rtol=1e-12)


def test_differences_of_decay_sums_are_exact_after_a_large_one():
    log_decay = -np.random.default_rng(0).uniform(0.001, 0.1, size=64).astype(np.float32)
    log_decay[3] = -2000
    exact = np.cumsum(log_decay.astype(np.float64))
    coarse, fine = (np.asarray(x) for x in split_cumsum(jnp.asarray(log_decay)))
    exact[4:] += 1000  # values below -1000 count as -1000
    exact[3] += 1000
    differences = (coarse[:, None] - coarse) + (fine[:, None] - fine)
    assert np.max(np.abs(differences - (exact[:, None] - exact))[5:, 5:]) < 3e-7
    plain = np.cumsum(log_decay)
    assert np.max(np.abs((plain[:, None] - plain) - (exact[:, None] - exact))[5:, 5:]) > 1e-5


@pytest.mark.parametrize("method", ["chunked", "associative"])
def test_b15_no_exponential_of_a_positive_number_is_ever_taken(monkeypatch, method):
    # Above the diagonal of a chunk the differences of these decays reach +75: exp of them would be infinite.
    arrays = example(15, **SHAPE, dtype=np.float32)
    arrays["log_decay"] = np.full_like(arrays["log_decay"], -5)
    segment_ids = np.tile(np.repeat([1, 0, 2, 3], [9, 3, 20, 5]), (2, 1)).astype(np.int32)
    exponents = []

    def recorded(x, exp=jnp.exp):
        jax.debug.callback(lambda largest: exponents.append(float(largest)), jnp.max(x))
        return exp(x)

    monkeypatch.setattr(jnp, "exp", recorded)

    @jax.jit
    def slope(arrays):
        return jax.grad(lambda x: run(x, segment_ids=segment_ids, method=method)[0].sum())(arrays)

    jax.block_until_ready(slope(arrays))
    jax.effects_barrier()
    assert len(exponents) >= 2
    assert max(exponents) <= 0


@pytest.mark.parametrize("method", METHODS)
def test_b15_the_gradient_of_a_strong_decay_is_finite_and_right(method):
    arrays = example(15, **SHAPE, dtype=np.float32)
    arrays["log_decay"] = np.full_like(arrays["log_decay"], -5)
    weights = (np.ones_like(arrays["v"]), np.zeros_like(arrays["initial_state"]))
    found = np.asarray(gradients(arrays, weights, ONE_SEGMENT, method=method)["log_decay"])
    for token in (0, 17, 36):
        ends = []
        for step in (1e-5, -1e-5):
            moved = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
            moved["log_decay"][0, token, 1] += step
            ends.append(loop(**moved)[0].sum())
        assert found[0, token, 1] == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-3)
