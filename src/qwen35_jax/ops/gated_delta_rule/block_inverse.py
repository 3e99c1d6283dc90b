"""Inverse of unit lower triangular matrices, the one linear system inside a chunk of the delta rule.

A chunk's corrections solve (I + L) x = b with L strictly lower triangular. Diagonal blocks of 16 are inverted by
forward substitution, then neighbours are joined, doubling the size each time:

    [ A  0 ]^-1     [  A^-1           0    ]
    [ C  B ]     =  [ -B^-1 C A^-1    B^-1 ].

Only entries of true inverses are ever formed. The shorter ways (a Neumann product of powers of L, Newton-Schulz
steps) form powers of L, which for correlated keys grow beyond 1e6 while the inverse stays below 1: in float32 nothing
is left of the answer.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qwen35_jax.ops.gated_delta_rule.products import product

SUBSTITUTION_SIZE = 16

SquareMatrices = Float[Array, "*batch size size"]


def _forward_substitution(lower: SquareMatrices) -> SquareMatrices:
    """Inverse of I + `lower`: column j of `lower` takes multiples of row j, by then final, from the rows below."""
    size = lower.shape[-1]

    def eliminate(j, inverse):
        column = jax.lax.dynamic_index_in_dim(lower, j, axis=-1, keepdims=True)
        row = jax.lax.dynamic_index_in_dim(inverse, j, axis=-2, keepdims=True)
        return inverse - column * row

    identity = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    return jax.lax.fori_loop(1, size - 1, eliminate, eliminate(0, identity))


def _blocks(
    matrix: SquareMatrices, size: int, *, row: int, column: int, step: int
) -> Float[Array, "*batch blocks block block"]:
    """Blocks (row, column), (row + step, column + step), ... of `matrix`, in blocks of `size`, as one axis."""
    count = matrix.shape[-1] // size // step
    corners = [((row + i * step) * size, (column + i * step) * size) for i in range(count)]
    return jnp.stack([matrix[..., y : y + size, x : x + size] for y, x in corners], axis=-3)


def _invert(lower: SquareMatrices) -> SquareMatrices:
    size = SUBSTITUTION_SIZE
    full = lower.shape[-1]
    if full <= size:
        return _forward_substitution(lower)
    padded = size
    while padded < full:
        padded *= 2
    lower = jnp.pad(lower, [(0, 0)] * (lower.ndim - 2) + [(0, padded - full)] * 2)

    inverse = _forward_substitution(_blocks(lower, size, row=0, column=0, step=1))
    while size < padded:
        upper_left, lower_right = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        between = _blocks(lower, size, row=1, column=0, step=2)
        lower_left = -product(lower_right, product(between, upper_left))
        inverse = jnp.concatenate(
            [
                jnp.concatenate([upper_left, jnp.zeros_like(upper_left)], axis=-1),
                jnp.concatenate([lower_left, lower_right], axis=-1),
            ],
            axis=-2,
        )
        size *= 2
    return inverse[..., 0, :full, :full]


@jax.custom_jvp
def unit_lower_inverse(lower: SquareMatrices) -> SquareMatrices:
    """Inverse of I + `lower`, where `lower` is strictly lower triangular (the rest of it must be zero).

    The derivative comes from the inverse X itself, dX = -X dL X: two products, forwards and backwards.
    """
    return _invert(lower)


@unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(
    primals: tuple[SquareMatrices], tangents: tuple[SquareMatrices]
) -> tuple[SquareMatrices, SquareMatrices]:
    (lower,), (tangent,) = primals, tangents
    inverse = unit_lower_inverse(lower)
    return inverse, -product(inverse, product(tangent, inverse))
