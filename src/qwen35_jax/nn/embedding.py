"""Token vectors, for the way in and the way out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from qwen35_jax.config import TextConfig
from qwen35_jax.nn.parameter import Keys, compute_dtype_for_state, normal, parameter
from qwen35_jax.ops.linear import linear


class Embedding(nnx.Module):
    """A vector per token; also the output head, whose rows are the vectors to compare with."""

    def __init__(self, config: TextConfig, *, parameter_dtype: DTypeLike, keys: Keys):
        axes = {"vocab": config.vocab_size, "embed": config.hidden_size}
        self.weight = parameter(keys, normal(config.initializer_range), axes, parameter_dtype)

    def lookup(self, tokens: Int[Array, "batch time"], dtype: DTypeLike) -> Float[Array, "batch time embed"]:
        # Without the barrier, which ties the table to the tokens, XLA's CPU compiler widens all of a bfloat16 table,
        # in a loop over steps before the first one.
        weight, tokens = jax.lax.optimization_barrier((self.weight[...], tokens))
        # An id outside the vocabulary gives NaN: JAX would otherwise read the nearest row without a word.
        rows = weight.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        return rows.astype(dtype)

    def logits(self, hidden: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Products summed in float32 (float64 in a float64 model), and left there for softmax and loss."""
        return linear(hidden, self.weight[...], dtype=compute_dtype_for_state(hidden.dtype))
