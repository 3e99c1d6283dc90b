"""How much of what its devices can do a training step does."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qwen35_jax.config import ModelConfig
from qwen35_jax.ops.segments import is_real, positions
from qwen35_jax.spec.closed_form import closed_form

FORWARD_AND_BACKWARD, FORWARD_AND_INPUTS = 3, 2
"""Passes over the products of a model: the backward pass has two for each of the forward pass, one for the gradient of
its input and one for that of its weight. With an adapter, weights have none."""


@jax.jit
def token_counts(
    segment_ids: Int[Array, "micro_batches batch time"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """How many tokens a batch has, and how many pairs of a token and one before it in its document."""
    rows = segment_ids.reshape(-1, segment_ids.shape[-1])
    real = is_real(rows)
    earlier = jnp.where(real, positions(rows), 0).astype(jnp.float32)
    return real.sum(dtype=jnp.float32), earlier.sum()


class StepWork(NamedTuple):
    """Floating-point operations that a step of training needs, whatever is computed again for want of memory.

    Attributes:
        per_token: of the step.
        per_pair: of a token and one before it in its document.
    """

    per_token: float
    per_pair: float

    def flops(self, tokens: float, pairs: float) -> float:
        """Of a step with so many tokens and pairs."""
        return tokens * self.per_token + pairs * self.per_pair


def step_work(config: ModelConfig, *, adapter: bool, mtp: bool) -> StepWork:
    """What a model's steps need.

    Args:
        config: of the model.
        adapter: the model's own weights stay as they are. The adapter's few products do not count.
        mtp: the multi-token-prediction head learns too: its layer, and the output head once more.
    """
    counts = closed_form(config, context=1, batch=1, dtype="float32")
    per_token = counts.weight_multiplications + counts.table_multiplications
    per_pair = counts.per_earlier_token
    if mtp:
        text = config.text
        per_token += counts.parameters["mtp"] + text.vocab_size * text.hidden_size
        per_pair += 2 * text.num_attention_heads * text.head_dim * text.mtp_num_hidden_layers
    passes = FORWARD_AND_INPUTS if adapter else FORWARD_AND_BACKWARD
    return StepWork(2.0 * passes * per_token, 2.0 * passes * per_pair)
