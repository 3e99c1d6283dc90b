"""Moving narrow floats without computing with them."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

Move = Callable[..., Shaped[Array, "..."]]


def as_bits(move: Move) -> Move:
    """Lets a slice, an update or a scatter of bfloat16 or float16 work on integers of the same bits, on a CPU.

    XLA's CPU compiler widens whatever such an operation touches to float32 and rounds the result: writing one token
    into a cache converted all of the cache, twice. Elsewhere, and for other dtypes, `move` runs as it is.

    Args:
        move: takes arrays of one dtype and returns one of that dtype, made of their values and nothing else.
    """

    def run(*arrays: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        dtype = arrays[0].dtype
        if dtype.itemsize != 2 or not jnp.issubdtype(dtype, jnp.floating):
            return move(*arrays)

        def on_bits(*arrays: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
            bits = (lax.bitcast_convert_type(array, jnp.uint16) for array in arrays)
            return lax.bitcast_convert_type(move(*bits), dtype)

        return lax.platform_dependent(*arrays, cpu=on_bits, default=move)

    return run
