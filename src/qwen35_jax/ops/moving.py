"""Narrow floats that programs write into, kept as whole numbers of the same bits on a CPU.

XLA's CPU compiler widens whatever a scatter or an update of bfloat16 touches to float32 and rounds the result: writing
one token into a cache converted all of the cache, twice. (Turning the cache into bits for each write is no way out: the
compiler copies it for that, twice as well.) So there the cache itself holds the bits, and what is read of it is turned
back.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped


def storage_dtype(dtype: DTypeLike) -> jnp.dtype:
    """What an array of this dtype that is written into piece by piece is kept as: uint16 for bfloat16 on a CPU."""
    bits = jax.default_backend() == "cpu" and dtype == jnp.bfloat16
    return jnp.dtype(jnp.uint16 if bits else dtype)


def to_storage(x: Float[Array, "*shape"], dtype: DTypeLike) -> Shaped[Array, "*shape"]:
    """Values as they go into an array of a `storage_dtype`."""
    if dtype == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(dtype)


def from_storage(x: Shaped[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Values that were kept as `to_storage` gave them."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
