"""Linear maps between the residual stream and heads.

The products are taken over flattened heads: XLA's CPU compiler passes a two-dimensional [out, in] weight to its
matrix product as it lies in memory, but copies a three-dimensional one into another layout at every call.
"""

from __future__ import annotations

import einops
from jaxtyping import Array, Float

from qwen35_jax.ops.linear import linear


def project(
    x: Float[Array, "batch time embed"], weight: Float[Array, "*heads embed"]
) -> Float[Array, "batch time *heads"]:
    """y[b, t, ...] = sum over d of x[b, t, d] weight[..., d], in the dtype of `x`."""
    y = linear(x, einops.rearrange(weight, "... d -> (...) d"))
    return y.reshape(*x.shape[:2], *weight.shape[:-1])


def merge_heads(
    y: Float[Array, "batch time *heads"], weight: Float[Array, "embed *heads"]
) -> Float[Array, "batch time embed"]:
    """x[b, t, d] = sum over heads and their channels of y[b, t, ...] weight[d, ...], in the dtype of `y`."""
    return linear(einops.rearrange(y, "b t ... -> b t (...)"), einops.rearrange(weight, "d ... -> d (...)"))
