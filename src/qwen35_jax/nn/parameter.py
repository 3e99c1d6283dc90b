"""How a parameter is made: its array, and the logical axes that a mesh may later cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from qwen35_jax.errors import ConfigError

Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]

Keys = Iterator[jax.Array] | None
"""Random keys for the initial values, or None for parameters that have a shape and a dtype but no data."""

zeros = jax.nn.initializers.zeros
ones = jax.nn.initializers.ones
normal = jax.nn.initializers.normal


def key_stream(key: jax.Array) -> Iterator[jax.Array]:
    """As many independent keys as are asked for."""
    count = 0
    while True:
        yield jax.random.fold_in(key, count)
        count += 1


def parameter(
    keys: Keys,
    initializer: Initializer,
    axes: dict[str, int],
    dtype: DTypeLike,
) -> nnx.Param:
    """A parameter whose shape and logical axes are given together, outermost first.

    Args:
        keys: see `Keys`.
        initializer: draws the initial values.
        axes: logical axis name to size, e.g. `{"value_heads": 32, "value_dim": 128, "embed": 2560}`.
        dtype: dtype of storage; a forward casts to its compute dtype where it uses the value.
    """
    shape, dtype = tuple(axes.values()), jax.dtypes.canonicalize_dtype(dtype)
    value = jax.ShapeDtypeStruct(shape, dtype) if keys is None else initializer(next(keys), shape, dtype)
    return nnx.Param(value, axes=tuple(axes))


def compute_dtype_for_state(dtype: DTypeLike) -> jnp.dtype:
    """float32, or float64 where the activations are float64: for decay, beta, norms, softmax and state."""
    return jnp.promote_types(dtype, jnp.float32)


def check_float_dtype(name: str, dtype: DTypeLike) -> None:
    """Refuses what is no floating-point dtype, and float64 while JAX's 64-bit types are off.

    Raises:
        ConfigError: names `name`. JAX alone would compute in float32 and only warn.
    """
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        raise ConfigError(f"{name} is {dtype!r}, expected bfloat16, float16, float32 or float64") from None
    if not jnp.issubdtype(found, jnp.floating):
        raise ConfigError(f"{name} is {found}, expected bfloat16, float16, float32 or float64")
    if found == jnp.float64 and not jax.config.read("jax_enable_x64"):
        raise ConfigError(
            f'{name} is float64, and 64-bit types are off: jax.config.update("jax_enable_x64", True)'
        )
