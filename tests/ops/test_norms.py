"""Normalisations: their formulas in float64, what they do in bfloat16, and their gradients at zero."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.errors import ConfigError
from qwen35_jax.ops.norms import gated_rms_norm, l2_normalize, rms_norm

EPS = 1e-3


@pytest.fixture
def draws() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(2, 5, 3, 7)),
        "gate": rng.normal(size=(2, 5, 3, 7)),
        "weight": rng.normal(size=7),
    }


def test_rms_norm_is_zero_centred(x64, draws: dict[str, np.ndarray]):
    x, weight = draws["x"], draws["weight"]
    expected = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + EPS) * (1 + weight)
    got = rms_norm(jnp.array(x), jnp.array(weight), EPS)
    assert got.dtype == jnp.float64
    np.testing.assert_allclose(got, expected, rtol=1e-14)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gated_rms_norm_has_a_plain_weight_and_gates_last(x64, draws: dict[str, np.ndarray], activation):
    x, gate, weight = draws["x"], draws["gate"], draws["weight"]
    opened = 1 / (1 + np.exp(-gate)) * (gate if activation == "silu" else 1)
    expected = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + EPS) * weight * opened
    got = gated_rms_norm(jnp.array(x), jnp.array(gate), jnp.array(weight), EPS, activation)
    np.testing.assert_allclose(got, expected, rtol=1e-13)


def test_gated_rms_norm_names_an_unknown_activation():
    with pytest.raises(ConfigError, match=r"output_gate_type: found 'swish2'"):
        gated_rms_norm(jnp.ones((2, 3)), jnp.ones((2, 3)), jnp.ones(3), EPS, "swish2")  # pyright: ignore


def test_l2_normalize_adds_eps_to_the_sum(x64, draws: dict[str, np.ndarray]):
    x = draws["x"]
    expected = x / np.sqrt(np.sum(x**2, -1, keepdims=True) + EPS)
    np.testing.assert_allclose(l2_normalize(jnp.array(x), EPS), expected, rtol=1e-14)


def test_l2_normalize_of_a_zero_row_is_zero_with_a_finite_gradient():
    x = jnp.zeros((2, 7)).at[1].set(0.5)
    value, gradient = jax.value_and_grad(lambda x: l2_normalize(x)[:, 0].sum())(x)
    np.testing.assert_allclose(value, 0.5 / np.sqrt(7 * 0.25), rtol=1e-5)
    np.testing.assert_allclose(gradient[0], [1000.0] + [0.0] * 6)  # eps^-1/2 along the row, nothing else
    assert jnp.isfinite(gradient).all()


def test_b25_small_weight_of_a_bfloat16_norm_is_not_lost_beside_the_1():
    weight = jnp.full(8, 0.00173, jnp.bfloat16)
    assert 1 + weight[0] == 1  # what adding in bfloat16 would give
    signs = np.tile([1.0, -1.0], 4)
    wide = rms_norm(jnp.array(signs, jnp.float32), weight, 0.0)
    np.testing.assert_allclose(wide, signs * 1.00173, atol=1e-5)
    # In bfloat16 it shows where the product's rounding lets it: rms 1, one entry a little below the next number.
    x = jnp.array([1.171875, 0.8], jnp.bfloat16)
    scaled = np.array(x, np.float64) / np.sqrt((np.array(x, np.float64) ** 2).mean())
    weights = np.linspace(0, 0.0039, 14).astype(jnp.bfloat16)
    normed = jnp.stack([rms_norm(x, jnp.full(2, w), 0.0) for w in weights])
    assert normed.dtype == jnp.bfloat16
    expected = (scaled * (1 + weights.astype(np.float64))[:, None]).astype(jnp.bfloat16)
    np.testing.assert_array_equal(normed, expected)
    assert len(np.unique(expected)) > 2  # some of these weights change the rounded result


def test_b21_statistics_of_bfloat16_inputs_are_summed_in_float32():
    rng = np.random.default_rng(1)
    x = jnp.array(rng.normal(size=(3, 4096)), jnp.bfloat16)
    exact = np.array(x, np.float64)
    unit = l2_normalize(x)
    assert unit.dtype == jnp.float32
    np.testing.assert_allclose(unit, exact / np.sqrt((exact**2).sum(-1, keepdims=True) + 1e-6), rtol=1e-5)
    gate = jnp.ones((3, 4096), jnp.bfloat16)
    for normed in (
        rms_norm(x, jnp.zeros(4096), 1e-6),
        gated_rms_norm(x, gate * 50, jnp.ones(4096), 1e-6, "sigmoid"),
    ):
        assert normed.dtype == jnp.bfloat16
        exact_normed = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-6)
        np.testing.assert_allclose(np.array(normed, np.float64), exact_normed, rtol=2**-8)  # one rounding


def test_gated_rms_norm_takes_the_gates_dtype():
    x, gate = jnp.ones((2, 8), jnp.float32), jnp.ones((2, 8), jnp.bfloat16)
    assert gated_rms_norm(x, gate, jnp.ones(8), EPS, "silu").dtype == jnp.bfloat16
