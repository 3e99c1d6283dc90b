"""Linear maps between the residual stream and heads.

The products are taken over flattened heads: XLA's CPU compiler passes a two-dimensional [out, in] weight to its
matrix product as it lies in memory, but copies a three-dimensional one into another layout at every call.

Where a low-rank change stands beside a weight, its product is added to that of the weight.
"""

from __future__ import annotations

import einops
from jaxtyping import Array, Float

from qwen35_jax.ops.linear import linear
from qwen35_jax.ops.low_rank import LowRankWeight


def project(
    x: Float[Array, "batch time embed"], weight: Float[Array, "*heads embed"] | LowRankWeight
) -> Float[Array, "batch time *heads"]:
    """y[b, t, ...] = sum over d of x[b, t, d] weight[..., d], in the dtype of `x`."""
    if isinstance(weight, LowRankWeight):
        change = project(project(weight.seen(x), weight.a), weight.b)
        return project(x, weight.base) + weight.scale * change
    y = linear(x, einops.rearrange(weight, "... d -> (...) d"))
    return y.reshape(*x.shape[:2], *weight.shape[:-1])


def merge_heads(
    y: Float[Array, "batch time *heads"], weight: Float[Array, "embed *heads"] | LowRankWeight
) -> Float[Array, "batch time embed"]:
    """x[b, t, d] = sum over heads and their channels of y[b, t, ...] weight[d, ...], in the dtype of `y`."""
    if isinstance(weight, LowRankWeight):
        change = merge_heads(merge_heads(weight.seen(y), weight.a), weight.b)
        return merge_heads(y, weight.base) + weight.scale * change
    return linear(einops.rearrange(y, "b t ... -> b t (...)"), einops.rearrange(weight, "d ... -> d (...)"))
