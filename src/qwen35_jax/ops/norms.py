"""Normalisations of the Qwen3.5 layers. Statistics and weights are in float32 (float64 for float64 inputs)."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qwen35_jax.errors import ConfigError


def rms_norm(
    x: Float[Array, "*batch dim"], weight: Float[Array, "dim"], eps: float
) -> Float[Array, "*batch dim"]:
    """Zero-centred RMS norm: x / sqrt(mean(x^2) + eps) * (1 + weight), over the last axis.

    `1 + weight` is formed in float32: in bfloat16 a weight below 2^-8 would vanish beside the 1. The product
    is cast once, at the end, to the dtype of `x`. Every norm of the family has this form but the one inside
    Gated DeltaNet.

    Source: Zhang & Sennrich, "Root Mean Square Layer Normalization" (2019); Qwen3_5RMSNorm in transformers.
    """
    wide = _at_least_float32(x)
    return (wide * _inverse_rms(wide, eps) * (1 + weight.astype(wide.dtype))).astype(x.dtype)


def gated_rms_norm(
    x: Float[Array, "*batch dim"],
    gate: Float[Array, "*batch dim"],
    weight: Float[Array, "dim"],
    eps: float,
    activation: Literal["silu", "sigmoid"] = "silu",
) -> Float[Array, "*batch dim"]:
    """Output norm of Gated DeltaNet: weight * x / sqrt(mean(x^2) + eps) * activation(gate), norm before gate.

    The weight is plain, not zero-centred. All of it is computed in float32 (float64) and cast once, to the
    dtype of `gate`: `x` usually comes in float32 from the delta rule while `gate` has the activations' dtype.
    (transformers rounds to the activations' dtype before the weight as well, which only loses accuracy.)

    Args:
        x: outputs of the delta rule, one head per row.
        gate: pre-activation gate, same shape.
        weight: shared by all heads.
        eps: added to the mean square.
        activation: what the gate goes through.

    Raises:
        ConfigError: the activation is unknown.

    Source: Yang, Kautz & Hatamizadeh, "Gated Delta Networks" (2024), section 3; Qwen3_5RMSNormGated in
    transformers.
    """
    activations = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}
    if activation not in activations:
        raise ConfigError(f"output_gate_type: found {activation!r}, expected one of {sorted(activations)}")
    wide = jnp.promote_types(jnp.promote_types(x.dtype, gate.dtype), jnp.float32)
    x_wide = x.astype(wide)
    normed = x_wide * _inverse_rms(x_wide, eps) * weight.astype(wide)
    return (normed * activations[activation](gate.astype(wide))).astype(gate.dtype)


def l2_normalize(x: Float[Array, "*batch dim"], eps: float = 1e-6) -> Float[Array, "*batch dim"]:
    """x / sqrt(sum(x^2) + eps) over the last axis, in float32 (float64 for float64 inputs).

    `eps` is added to the sum, not to the mean, and stands inside the root, so that a zero row (padding) gives
    zeros and a finite gradient.
    """
    wide = _at_least_float32(x)
    return wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + eps)


def _inverse_rms(x: Float[Array, "*batch dim"], eps: float) -> Float[Array, "*batch 1"]:
    return jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def _at_least_float32(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
