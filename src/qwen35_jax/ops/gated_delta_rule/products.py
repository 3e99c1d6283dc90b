"""Matrix products in full precision, wherever the hardware would rather round float32 operands."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

HIGHEST = jax.lax.Precision.HIGHEST


def product(a: Float[Array, "*#batch m n"], b: Float[Array, "*#batch n p"]) -> Float[Array, "*batch m p"]:
    """a b."""
    return jnp.matmul(a, b, precision=HIGHEST)


def product_nt(a: Float[Array, "*batch m n"], b: Float[Array, "*batch p n"]) -> Float[Array, "*batch m p"]:
    """a b^T, without a transposed copy of b."""
    return jnp.einsum("...mn,...pn->...mp", a, b, precision=HIGHEST)


def product_tn(a: Float[Array, "*batch n m"], b: Float[Array, "*batch n p"]) -> Float[Array, "*batch m p"]:
    """a^T b, without a transposed copy of a."""
    return jnp.einsum("...nm,...np->...mp", a, b, precision=HIGHEST)


def row_dots(a: Float[Array, "*batch m n"], b: Float[Array, "*batch m n"]) -> Float[Array, "*batch m"]:
    """Dot products of the rows of a with those of b. (As a sum of a product, XLA is 8 times slower on a CPU.)"""
    return jnp.einsum("...mn,...mn->...m", a, b, precision=HIGHEST)
