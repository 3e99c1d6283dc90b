"""Linear maps between the residual stream and heads.

The products are written over flattened heads: XLA's CPU compiler passes a two-dimensional [out, in] weight to its
matrix product as it lies in memory, but copies a three-dimensional one into another layout at every call.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from qwen35_jax.ops.precision import product_precision


def project(
    x: Float[Array, "batch time embed"], weight: Float[Array, "*heads embed"]
) -> Float[Array, "batch time *heads"]:
    """y[b, t, ...] = sum over d of x[b, t, d] weight[..., d], in the dtype of `x`."""
    *heads, embed = weight.shape
    flat = weight.reshape(math.prod(heads), embed).astype(x.dtype)
    y = jnp.einsum("btd,nd->btn", x, flat, precision=product_precision(x.dtype))
    return y.reshape(*x.shape[:2], *heads)


def merge_heads(
    y: Float[Array, "batch time *heads"], weight: Float[Array, "embed *heads"]
) -> Float[Array, "batch time embed"]:
    """x[b, t, d] = sum over heads and their channels of y[b, t, ...] weight[d, ...], in the dtype of `y`."""
    batch, time = y.shape[:2]
    flat = weight.reshape(weight.shape[0], -1).astype(y.dtype)
    return jnp.einsum("btn,dn->btd", y.reshape(batch, time, -1), flat, precision=product_precision(y.dtype))
