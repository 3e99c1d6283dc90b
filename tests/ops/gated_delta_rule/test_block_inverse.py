"""The inverse inside a chunk, where the shortcuts of others lose every digit: correlated and repeated keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.ops.gated_delta_rule.block_inverse import unit_lower_inverse

inverse = jax.jit(unit_lower_inverse)


def system(keys, size, seed=0):
    """Strictly lower part of beta_i (k_i . k_j), the matrix of a chunk without decay, for two heads of 128."""
    rng = np.random.default_rng(seed)
    k = rng.normal(size=(2, size, 128))
    if keys == "correlated":
        k = rng.normal(size=(2, 1, 128)) + 0.05 * k
    elif keys == "repeated":
        k = k[:, :4][:, rng.integers(4, size=size)]
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    return np.tril(rng.uniform(0.9, 1, size=(2, size, 1)) * (k @ k.mT), -1)


@pytest.mark.parametrize("size", [1, 5, 16, 24, 64])
def test_inverse_is_right_in_float64_for_any_size(x64, size):
    lower = system("random", size)
    np.testing.assert_allclose(inverse(lower), np.linalg.inv(np.eye(size) + lower), atol=1e-14)


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("keys", ["random", "correlated", "repeated"])
def test_inverse_keeps_its_digits_in_float32(size, keys):
    lower = system(keys, size).astype(np.float32)
    expected = np.linalg.inv(np.eye(size) + lower.astype(np.float64))
    error = np.linalg.norm(inverse(lower) - expected) / np.linalg.norm(expected)
    assert error < 2e-6


def test_a_product_of_powers_would_lose_them_so_these_keys_are_a_test():
    lower = system("correlated", 64).astype(np.float32)
    neumann, power = np.eye(64, dtype=np.float32) - lower, lower @ lower
    while np.any(power):
        neumann, power = neumann + neumann @ power, power @ power
    expected = np.linalg.inv(np.eye(64) + lower.astype(np.float64))
    assert np.linalg.norm(neumann - expected) / np.linalg.norm(expected) > 1e3


def test_derivatives_are_the_slope_of_a_general_inverse_both_ways(x64):
    lower = system("correlated", 24)
    weights, direction = np.random.default_rng(1).normal(size=(2, *lower.shape))
    direction = np.tril(direction, -1)
    ends = [np.linalg.inv(np.eye(24) + lower + step * direction) for step in (1e-6, -1e-6)]
    slope = (ends[0] - ends[1]) / 2e-6
    _, tangent = jax.jvp(inverse, (lower,), (direction,))
    np.testing.assert_allclose(tangent, slope, rtol=1e-6, atol=1e-7)
    gradient = jax.grad(lambda x: jnp.vdot(weights, inverse(x)))(lower)
    assert np.vdot(gradient, direction) == pytest.approx(np.vdot(weights, slope), rel=1e-6)
