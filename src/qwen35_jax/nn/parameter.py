"""How a parameter is made: its array, and the logical axes that a mesh may later cut."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

Initializer = jax.nn.initializers.Initializer

zeros = jax.nn.initializers.zeros
ones = jax.nn.initializers.ones
normal = jax.nn.initializers.normal


def parameter(
    rngs: nnx.Rngs,
    initializer: Initializer,
    axes: dict[str, int],
    dtype: DTypeLike,
) -> nnx.Param:
    """A parameter whose shape and logical axes are given together, outermost first.

    Args:
        rngs: source of the initial values.
        initializer: draws them.
        axes: logical axis name to size, e.g. `{"value_heads": 32, "value_dim": 128, "embed": 2560}`.
        dtype: dtype of storage; a forward casts to its compute dtype where it uses the value.
    """
    value = initializer(rngs.params(), tuple(axes.values()), jnp.dtype(dtype))
    return nnx.Param(value, axes=tuple(axes))


def compute_dtype_for_state(dtype: DTypeLike) -> jnp.dtype:
    """float32, or float64 where the activations are float64: for decay, beta, norms, softmax and state."""
    return jnp.promote_types(dtype, jnp.float32)
