"""The zero-centred RMS norm that stands before every mixer and feed-forward, and at the end of the stack."""

from __future__ import annotations

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from qwen35_jax.nn.parameter import Keys, parameter, zeros
from qwen35_jax.ops.norms import rms_norm


class RMSNorm(nnx.Module):
    """x / rms(x) * (1 + weight), with statistics and `1 + weight` in float32.

    The stored weight is the raw deviation from one, as in the checkpoint.
    Source: `Qwen3_5RMSNorm` of the reference implementation.
    """

    def __init__(self, size: int, *, eps: float, parameter_dtype: DTypeLike, keys: Keys):
        self.weight = parameter(keys, zeros, {"embed": size}, parameter_dtype)
        self.eps = eps

    def __call__(self, x: Float[Array, "batch time embed"]) -> Float[Array, "batch time embed"]:
        return rms_norm(x, self.weight[...], self.eps)
