"""Rotary embedding: frequencies, interleaved axes, YaRN numbers, and precision at long range."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.config import RopeConfig
from qwen35_jax.errors import ConfigError
from qwen35_jax.ops.rope import apply_rotary, rotary_cos_sin, rotary_frequencies

SHIPPED = RopeConfig(rope_theta=1e7)
YARN = RopeConfig(rope_type="yarn", rope_theta=1e7, factor=4.0, original_max_position_embeddings=262_144)


def followed_axes(section: tuple[int, int, int], half: int) -> str:
    """Letter of the axis each pair follows, found by moving one axis at a time."""
    axes = [""] * half
    for axis, letter in enumerate("THW"):
        positions = np.zeros((3, 1, 1), np.int32)
        positions[axis] = 1
        _, sin = rotary_cos_sin(jnp.array(positions), jnp.full(half, 0.5), section)
        for pair in np.flatnonzero(np.array(sin)[0, 0]):
            axes[pair] += letter
    assert all(len(letters) == 1 for letters in axes)
    return "".join(axes)


def test_frequencies_fall_from_1_by_equal_factors(x64):
    inv_freq, scaling = rotary_frequencies(SHIPPED, 64, dtype=jnp.float64)
    assert inv_freq.dtype == jnp.float64
    np.testing.assert_allclose(inv_freq, [1e7 ** (-2 * i / 64) for i in range(32)], rtol=1e-14)
    assert scaling == 1.0


def test_rotation_turns_each_pair_by_its_phase_and_leaves_the_rest_bit_for_bit(x64):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 5, 3, 20))
    positions = rng.integers(0, 500, size=(2, 5))
    inv_freq, _ = rotary_frequencies(SHIPPED, 12, dtype=jnp.float64)
    cos, sin = rotary_cos_sin(jnp.array(positions), inv_freq, (2, 2, 2))
    phase = positions[..., None] * np.array(inv_freq)
    turned = (x[..., :6] + 1j * x[..., 6:12]) * np.exp(1j * phase)[:, :, None]
    got = np.array(apply_rotary(jnp.array(x), cos, sin))
    np.testing.assert_allclose(got[..., :6], turned.real, atol=1e-14)
    np.testing.assert_allclose(got[..., 6:12], turned.imag, atol=1e-14)
    np.testing.assert_array_equal(got[..., 12:], x[..., 12:])


def test_three_equal_axes_are_plain_rotation():
    inv_freq, _ = rotary_frequencies(SHIPPED, 64)
    positions = jnp.arange(14).reshape(2, 7)
    plain = rotary_cos_sin(positions, inv_freq, (11, 11, 10))
    axes = rotary_cos_sin(jnp.stack([positions] * 3), inv_freq, (11, 11, 10))
    np.testing.assert_array_equal(plain, axes)


@pytest.mark.parametrize(
    ("section", "half", "letters"),
    [
        ((11, 11, 10), 32, "THW" * 10 + "TH"),
        ((4, 2, 2), 8, "THWTHWTT"),
        ((3, 3, 2), 8, "THWTHWTH"),
        ((2, 1, 5), 8, "THWTTWTT"),
    ],
)
def test_b64_axes_are_interleaved(section: tuple[int, int, int], half: int, letters: str):
    assert followed_axes(section, half) == letters


def test_b64_bfloat16_rest_of_the_head_passes_bit_for_bit():
    x = jnp.array(np.random.default_rng(1).normal(size=(1, 3, 2, 256)), jnp.bfloat16)
    inv_freq, _ = rotary_frequencies(SHIPPED, 64, dtype=jnp.bfloat16)
    turned = apply_rotary(x, *rotary_cos_sin(jnp.array([[7, 8, 9]]), inv_freq, (11, 11, 10)))
    assert turned.dtype == jnp.bfloat16
    np.testing.assert_array_equal(turned[..., 64:], x[..., 64:])
    assert (turned[..., :16] != x[..., :16]).any(axis=(0, 1, 2)).all()


@pytest.mark.parametrize(("position", "to_float64"), [(4095, 1e-4), (15_962, 1e-3), (262_143, 1e-2)])
def test_b26_phases_of_a_bfloat16_model_are_float32(position: int, to_float64: float):
    inv_freq, _ = rotary_frequencies(SHIPPED, 64, dtype=jnp.bfloat16)
    assert inv_freq.dtype == jnp.float32
    cos, sin = (np.array(x)[0, 0] for x in rotary_cos_sin(jnp.array([[position]]), inv_freq, (11, 11, 10)))
    exact = 1e7 ** (-np.arange(32) / 32)
    single = np.float32(position) * (1 / (1e7 ** (np.arange(32) / 32)).astype(np.float32))
    assert single.dtype == np.float32
    np.testing.assert_allclose(cos, np.cos(single.astype(np.float64)), atol=1e-5)
    np.testing.assert_allclose(sin, np.sin(single.astype(np.float64)), atol=1e-5)
    np.testing.assert_allclose(cos, np.cos(position * exact), atol=to_float64)
    np.testing.assert_allclose(sin, np.sin(position * exact), atol=to_float64)


def test_b26_last_two_positions_of_the_context_differ():
    inv_freq, _ = rotary_frequencies(SHIPPED, 64)
    cos, sin = rotary_cos_sin(jnp.array([[262_142, 262_143]]), inv_freq, (11, 11, 10))
    assert np.abs(cos[0, 0] - cos[0, 1]).max() > 0.1 and np.abs(sin[0, 0] - sin[0, 1]).max() > 0.1
    assert ((cos[0, 0] != cos[0, 1]) | (sin[0, 0] != sin[0, 1]))[:16].all()


def test_b72_yarn_frequencies_and_scaling(x64):
    inv_freq, scaling = rotary_frequencies(YARN, 64, dtype=jnp.float64)
    expected = [1, 0.0177828, 2.569351e-4, 1.844922e-5, 1.405853e-6, 4.137043e-8]
    np.testing.assert_allclose(inv_freq[jnp.array([0, 8, 16, 20, 24, 31])], expected, rtol=1e-6)
    assert scaling == pytest.approx(1.1386294, abs=1e-7)
    plain, _ = rotary_frequencies(SHIPPED, 64, dtype=jnp.float64)
    ratio = np.array(inv_freq / plain)
    np.testing.assert_array_equal(ratio[:15], 1)  # correction range 14 .. 22
    np.testing.assert_allclose(ratio[22:], 1 / 4, rtol=1e-14)
    assert (np.diff(ratio[14:23]) < 0).all()


def test_b72_yarn_keeps_the_sections_and_scales_cos_and_sin():
    inv_freq, scaling = rotary_frequencies(YARN, 64)
    positions = jnp.array([[[3]], [[50]], [[700]]])
    cos, sin = rotary_cos_sin(positions, inv_freq, (11, 11, 10), scaling)
    phase = np.array([3, 50, 700])[np.arange(32) % 3] * np.array(inv_freq, np.float64)
    np.testing.assert_allclose(cos[0, 0], np.cos(phase) * 1.1386294, atol=1e-5)
    np.testing.assert_allclose(sin[0, 0], np.sin(phase) * 1.1386294, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({"attention_factor": 0.75}, 0.75),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 0.707, "mscale_all_dim": 0.5}, (0.0707 * np.log(4) + 1) / (0.05 * np.log(4) + 1)),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_yarn_scaling_fields(fields: dict[str, float], scaling: float):
    assert rotary_frequencies(dataclasses.replace(YARN, **fields), 64)[1] == pytest.approx(scaling, rel=1e-12)


def test_yarn_without_truncation_ramps_between_real_indices(x64):
    inv_freq, _ = rotary_frequencies(dataclasses.replace(YARN, truncate=False), 64, dtype=jnp.float64)
    plain, _ = rotary_frequencies(SHIPPED, 64, dtype=jnp.float64)

    def pair_turning(turns: float) -> float:
        return 64 * np.log(262_144 / (turns * 2 * np.pi)) / (2 * np.log(1e7))

    ramp = (np.arange(32) - pair_turning(32)) / (pair_turning(1) - pair_turning(32))
    expected = 1 - 0.75 * np.clip(ramp, 0, 1)
    np.testing.assert_allclose(inv_freq / plain, expected, rtol=1e-12)


def test_b72_unknown_rope_type_raises():
    with pytest.raises(ConfigError, match="rope_type"):
        rotary_frequencies(dataclasses.replace(YARN, rope_type="dynamic"), 64)


def test_odd_rotary_dim_and_narrow_head_raise():
    with pytest.raises(ConfigError, match="gives 7 rotated dimensions"):
        rotary_frequencies(SHIPPED, 7)
    with pytest.raises(ValueError, match="head_dim of at least 8, found 6"):
        apply_rotary(jnp.ones((1, 1, 1, 6)), jnp.ones((1, 1, 4)), jnp.ones((1, 1, 4)))
