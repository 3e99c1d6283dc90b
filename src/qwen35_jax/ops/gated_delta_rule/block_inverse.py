"""Inverse of unit lower triangular matrices, the one linear system inside a chunk of the delta rule.

A chunk's corrections solve (I + L) x = b with L strictly lower triangular. The matrix is halved recursively,

    [ A 0 ]^-1     [  A^-1           0    ]
    [ C B ]     =  [ -B^-1 C A^-1    B^-1 ],

down to diagonal blocks of 16, which are solved by forward substitution. Only entries of true inverses are ever
formed. The shorter ways (a Neumann product of powers of L, Newton-Schulz steps) form powers of L, which for
correlated keys grow to 1e6 and more while the inverse stays below 1: in float32 nothing is left of the answer.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

HIGHEST = jax.lax.Precision.HIGHEST
SUBSTITUTION_SIZE = 16


def _matmul(a, b):
    return jnp.matmul(a, b, precision=HIGHEST)


def _forward_substitution(lower):
    """Inverse of I + `lower` row by row: row i = e_i - sum_{j<i} lower[i, j] row j."""
    size = lower.shape[-1]
    identity = jnp.eye(size, dtype=lower.dtype)
    rows = [jnp.broadcast_to(identity[0], (*lower.shape[:-2], size))]
    for i in range(1, size):
        known = jnp.stack(rows, axis=-2)
        rows.append(identity[i] - jnp.sum(lower[..., i, :i, None] * known, axis=-2))
    return jnp.stack(rows, axis=-2)


def _invert(lower):
    size = lower.shape[-1]
    if size <= SUBSTITUTION_SIZE:
        return _forward_substitution(lower)
    half = size // 2
    upper_left = _invert(lower[..., :half, :half])
    lower_right = _invert(lower[..., half:, half:])
    lower_left = -_matmul(lower_right, _matmul(lower[..., half:, :half], upper_left))
    top = jnp.concatenate([upper_left, jnp.zeros_like(lower_left.mT)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([lower_left, lower_right], axis=-1)], axis=-2)


@jax.custom_jvp
def unit_lower_inverse(lower: Float[Array, "*batch size size"]) -> Float[Array, "*batch size size"]:
    """Inverse of I + `lower`, where `lower` is strictly lower triangular (the rest of it must be zero).

    The derivative comes from the inverse X itself, dX = -X dL X: two products, forwards and backwards.
    """
    return _invert(lower)


@unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(primals, tangents):
    (lower,), (tangent,) = primals, tangents
    inverse = unit_lower_inverse(lower)
    return inverse, -_matmul(inverse, _matmul(tangent, inverse))
