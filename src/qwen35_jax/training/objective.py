"""What supervised fine-tuning minimizes: the next-token loss, and the loss of the multi-token-prediction head."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from qwen35_jax.errors import ConfigError
from qwen35_jax.model import Parameters
from qwen35_jax.nn.rematerialization import Rematerialize
from qwen35_jax.nn.text_model import TextModel
from qwen35_jax.ops.segments import is_real
from qwen35_jax.training.cross_entropy import TokenSums, cross_entropy


class Batch(NamedTuple):
    """Rows of packed documents.

    Attributes:
        tokens: ids.
        segment_ids: 0 marks padding, positive numbers are documents, see `qwen35_jax.ops.segments`.
        weights: how much each token counts as one to be predicted; 0 in prompts and padding. The first token of a
            document is predicted from nothing, and its weight is not looked at.
    """

    tokens: Int[Array, "*micro_batches batch time"]
    segment_ids: Int[Array, "*micro_batches batch time"]
    weights: Float[Array, "*micro_batches batch time"]


class Totals(NamedTuple):
    """Sums of the weights of all targets of an optimizer step, by which its losses are divided.

    They are those of all micro-batches and devices together, so a token counts the same however a step is split.

    Attributes:
        next_token: of the tokens that have one before them in their document.
        after_next: of those that have two, which is what the multi-token-prediction head learns from.
    """

    next_token: Float[Array, ""]
    after_next: Float[Array, ""]


class Measures(NamedTuple):
    """What a step tells of its batch. Means over the weights of the targets.

    Attributes:
        loss: what is minimized.
        cross_entropy: of the next token, in nats.
        accuracy: share of the targets that have the largest logit.
        mtp_cross_entropy: of the token after the next; 0 without the head.
        mtp_accuracy: the same of that.
    """

    loss: Float[Array, ""]
    cross_entropy: Float[Array, ""]
    accuracy: Float[Array, ""]
    mtp_cross_entropy: Float[Array, ""]
    mtp_accuracy: Float[Array, ""]


@dataclasses.dataclass(frozen=True)
class Objective:
    """Weights of the parts of the loss.

    Attributes:
        mtp_weight: of the multi-token-prediction head's loss beside the main one; 0 leaves the head out.
        z_loss: see `cross_entropy`.
        rematerialize: what the backward pass computes again.
    """

    mtp_weight: float = 0.0
    z_loss: float = 0.0
    rematerialize: Rematerialize = "all"

    def __post_init__(self) -> None:
        for name in ("mtp_weight", "z_loss"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{name} is {value!r}, expected a number of at least 0")

    def totals_of(self, batch: Batch) -> Totals:
        """`totals_of`, as a step asks for it."""
        return totals_of(batch)

    def loss(
        self, parameters: Parameters, graphdef: nnx.GraphDef, batch: Batch, totals: Totals
    ) -> tuple[Float[Array, ""], Measures]:
        """`batch_loss`, as a step asks for it."""
        return batch_loss(parameters, graphdef, batch, totals, self)


def totals_of(batch: Batch) -> Totals:
    """The totals of a step whose batch this is, with all its micro-batches."""
    return Totals(*(targets_of(batch, ahead)[1].sum() for ahead in (1, 2)))


def batch_loss(
    parameters: Parameters, graphdef: nnx.GraphDef, batch: Batch, totals: Totals, objective: Objective
) -> tuple[Float[Array, ""], Measures]:
    """A micro-batch's share of the loss of its step, and of what is told of it.

    Shares add up: with the totals of the whole step, the sums of losses, gradients and measures over its micro-batches
    are those of the step as one batch. A micro-batch without targets adds nothing.

    Args:
        parameters: to differentiate in.
        graphdef: of the model, which has the multi-token-prediction head where `mtp_weight` is not 0.
        batch: one micro-batch.
        totals: of the whole step, from `totals_of`.
        objective: weights of the parts.
    """
    model = nnx.merge(graphdef, parameters)
    hidden, _ = model(batch.tokens, segment_ids=batch.segment_ids, rematerialize=objective.rematerialize)
    main = _sums(model, hidden, batch, 1, objective)
    main_total = jnp.maximum(totals.next_token, 1)
    loss, head = main.loss / main_total, None
    if objective.mtp_weight:
        drafted = model.draft_hidden(hidden, batch.tokens, segment_ids=batch.segment_ids)
        head = _sums(model, jnp.pad(drafted, ((0, 0), (0, 1), (0, 0))), batch, 2, objective)
        head_total = jnp.maximum(totals.after_next, 1)
        loss = loss + objective.mtp_weight * head.loss / head_total
        head = jax.tree.map(lambda total: total / head_total, head)
    return loss, Measures(
        loss=loss,
        cross_entropy=main.cross_entropy / main_total,
        accuracy=main.correct / main_total,
        mtp_cross_entropy=jnp.zeros_like(loss) if head is None else head.cross_entropy,
        mtp_accuracy=jnp.zeros_like(loss) if head is None else head.correct,
    )


def _sums(
    model: TextModel, hidden: Float[Array, "batch time embed"], batch: Batch, ahead: int, objective: Objective
) -> TokenSums:
    targets, weights = targets_of(batch, ahead)
    return cross_entropy(hidden, model.head_weight, targets, weights, z_loss=objective.z_loss)


def targets_of(
    batch: Batch, ahead: int
) -> tuple[Int[Array, "*micro_batches batch time"], Float[Array, "*micro_batches batch time"]]:
    """The token so many ahead of each, and its weight: 0 where that is in no or another document."""

    def ahead_of(array: Array) -> Array:
        return jnp.pad(array[..., ahead:], ((0, 0),) * (array.ndim - 1) + ((0, ahead),))

    ids = batch.segment_ids
    # Numbers come again: the documents of [1 2 1] are three. So the whole way has to be inside.
    inside = is_real(ids)
    for step in range(1, ahead + 1):
        following = jnp.pad(ids[..., step:], ((0, 0),) * (ids.ndim - 1) + ((0, step),))
        inside &= following == ids
    return ahead_of(batch.tokens), jnp.where(inside, ahead_of(batch.weights), 0)
