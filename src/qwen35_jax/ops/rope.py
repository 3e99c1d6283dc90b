"""Rotary position embedding: partial, interleaved over three position axes (M-RoPE), stretched by YaRN."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from qwen35_jax.config import RopeConfig
from qwen35_jax.errors import ConfigError


def rotary_frequencies(
    config: RopeConfig, rotary_dim: int, *, dtype: DTypeLike = jnp.float32
) -> tuple[Float[Array, "rotary_half"], float]:
    """Radians per position of each rotated pair, and the factor on cos and sin.

    Args:
        config: `rope_type` "default" gives theta^(-2i/rotary_dim); "yarn" divides the slow pairs by `factor`.
        rotary_dim: rotated dimensions of a head (twice the number of pairs).
        dtype: of the frequencies. Anything narrower than float32 is widened to float32, as phases from bfloat16
            frequencies are off by whole turns beyond a few thousand tokens.

    Returns:
        Frequencies and the attention scaling (1 without YaRN). The powers of theta are rounded to `dtype` before
        they are inverted: in float32 that gives transformers' frequencies bit for bit, and phases grow with the
        position, so that one bit would show.

    Raises:
        ConfigError: odd rotary_dim.

    Source: Su et al., "RoFormer" (2021), section 3.2; Peng et al., "YaRN" (2023), sections 3.2 to 3.4.
    """
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ConfigError(
            f"partial_rotary_factor: gives {rotary_dim} rotated dimensions, expected an even number above 0"
        )
    half = rotary_dim // 2
    wide = np.dtype(jnp.promote_types(dtype, jnp.float32))
    positions_per_radian = (config.rope_theta ** (np.arange(half) / half)).astype(wide)
    inv_freq = 1 / positions_per_radian
    if config.rope_type == "default":
        return jnp.asarray(inv_freq), 1.0
    slowed = _yarn_share(config, rotary_dim).astype(wide)
    assert config.factor is not None  # RopeConfig sees to it
    stretched = 1 / (wide.type(config.factor) * positions_per_radian)
    return jnp.asarray(stretched * slowed + inv_freq * (1 - slowed)), _yarn_scaling(config, config.factor)


def _yarn_share(config: RopeConfig, rotary_dim: int) -> Float[np.ndarray, "rotary_half"]:
    """How far each pair is stretched: 0 for those that turn often in the original context, 1 for slow ones."""
    assert config.original_max_position_embeddings is not None  # RopeConfig sees to it
    original = config.original_max_position_embeddings

    def pair_turning(turns: float) -> float:
        """Index of the pair, as a real number, that makes so many turns over the original context."""
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = pair_turning(config.beta_fast), pair_turning(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    return np.clip((np.arange(rotary_dim // 2) - low) / (high - low), 0, 1)


def _yarn_scaling(config: RopeConfig, factor: float) -> float:
    """Factor on cos and sin that makes up for the flatter attention over a stretched context."""

    def gain(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return gain(config.mscale) / gain(config.mscale_all_dim)
    return gain(1.0)


def rotary_cos_sin(
    positions: Int[Array, "3 batch time"] | Int[Array, "batch time"],
    inv_freq: Float[Array, "rotary_half"],
    mrope_section: tuple[int, int, int],
    scaling: float = 1.0,
) -> tuple[Float[Array, "batch time rotary_half"], Float[Array, "batch time rotary_half"]]:
    """cos and sin of every token's phases, in the dtype of the frequencies.

    Args:
        positions: one position per token (text), or three: time, height, width.
        inv_freq: from `rotary_frequencies`.
        mrope_section: pairs per axis. The axes are interleaved: pair i follows height when i mod 3 = 1 and i <
            3 * section[1], width when i mod 3 = 2 and i < 3 * section[2], else time.
        scaling: factor on cos and sin (YaRN's attention factor).

    Source: Bai et al., "Qwen3-VL" (2025), interleaved M-RoPE.
    """
    at = positions.astype(inv_freq.dtype)[..., None]
    if positions.ndim == 3:
        pair = np.arange(inv_freq.shape[0])
        height = (pair % 3 == 1) & (pair < 3 * mrope_section[1])
        width = (pair % 3 == 2) & (pair < 3 * mrope_section[2])
        at = jnp.where(height, at[1], jnp.where(width, at[2], at[0]))
    phase = at * inv_freq
    return jnp.cos(phase) * scaling, jnp.sin(phase) * scaling


def apply_rotary(
    x: Float[Array, "batch time heads head_dim"],
    cos: Float[Array, "batch time rotary_half"],
    sin: Float[Array, "batch time rotary_half"],
) -> Float[Array, "batch time heads head_dim"]:
    """Rotates the pairs (i, i + rotary_half) of the leading 2 * rotary_half dimensions, leaves the rest.

    Computed in at least float32 and returned in the dtype of `x`.
    """
    half = cos.shape[-1]
    if 2 * half > x.shape[-1]:
        raise ValueError(f"cos: {half} pairs need a head_dim of at least {2 * half}, found {x.shape[-1]}")
    first, second, rest = jnp.split(x, [half, 2 * half], axis=-1)
    wide = jnp.promote_types(jnp.promote_types(x.dtype, cos.dtype), jnp.float32)
    cos, sin = cos[:, :, None].astype(wide), sin[:, :, None].astype(wide)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([part.astype(x.dtype) for part in turned] + [rest], axis=-1)
