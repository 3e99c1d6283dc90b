"""The loss, the optimizer and the schedule of nano."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int
from optax.contrib import MuonDimensionNumbers, muon

from qwen35_jax.model import Parameters

MTP_LOSS_WEIGHT = 0.2
MTP_SHARE_OF_ROWS = 4
"""The MTP head learns from one row in so many: it is one layer, and its loss costs as much as the main one."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How long and how fast. All by step, so that a run can be repeated.

    Attributes:
        steps: optimizer steps in all.
        rows, length: shape of a batch.
        curriculum_steps: steps until recall documents have their full length and number of bindings.
        last_stage_step: from here on most documents are about recall.
        warmup_steps: linear rise of the learning rate.
        decay_steps: linear fall to zero at the end; constant in between.
        learning_rate: of the matrices (Muon).
        adam_learning_rate: of embedding, norms, gates and convolutions.
    """

    steps: int
    decay_steps: int
    rows: int = 8
    length: int = 512
    curriculum_steps: int = 700
    last_stage_step: int = 1000
    warmup_steps: int = 40
    learning_rate: float = 0.02
    adam_learning_rate: float = 0.004

    def progress(self, step: int) -> float:
        """How far the curriculum is, from 0 to 1, and 2 in the last stage."""
        return 2.0 if step >= self.last_stage_step else min(1.0, step / self.curriculum_steps)

    def scale(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Factor on the learning rates."""
        rise = (step + 1) / self.warmup_steps
        fall = (self.steps - step) / max(1, self.decay_steps)
        return jnp.minimum(1.0, jnp.minimum(rise, fall))


def cross_entropy(
    logits: Float[Array, "batch time vocab"], targets: Int[Array, "batch time"]
) -> Float[Array, "batch time"]:
    """Negative log likelihood in nats."""
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def loss(
    parameters: Parameters,
    graphdef: nnx.GraphDef,
    tokens: Int[Array, "batch time"],
    segment_ids: Int[Array, "batch time"],
    weights: Float[Array, "batch time"],
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Weighted mean of the next-token loss, plus the MTP head's loss on a part of the rows."""
    model = nnx.merge(graphdef, parameters)
    hidden, _ = model(tokens, segment_ids=segment_ids)

    def mean_loss(values, ahead, rows):
        # The value at t is for token t + ahead, if that lies in the same document.
        same = (segment_ids[:rows, ahead:] == segment_ids[:rows, :-ahead]) & (segment_ids[:rows, ahead:] > 0)
        weight = jnp.where(same, weights[:rows, ahead:], 0.0)
        losses = cross_entropy(model.logits(values), tokens[:rows, ahead:])
        return jnp.sum(losses * weight) / jnp.maximum(jnp.sum(weight), 1.0)

    next_token = mean_loss(hidden[:, :-1], 1, tokens.shape[0])
    rows = max(1, tokens.shape[0] // MTP_SHARE_OF_ROWS)
    drafted = model.draft_hidden(hidden[:rows], tokens[:rows], segment_ids=segment_ids[:rows])
    after_next = mean_loss(drafted[:, :-1], 2, rows)
    return next_token + MTP_LOSS_WEIGHT * after_next, {"loss": next_token, "mtp_loss": after_next}


# For Muon: which axes of a matrix are summed over, and which come out, counted from the end so that the
# repeats axis of stacked layers stays a batch axis. Anything not named here is updated by Adam.
MATRICES = {
    "q_weight": MuonDimensionNumbers(-1, (-3, -2)),
    "k_weight": MuonDimensionNumbers(-1, (-3, -2)),
    "v_weight": MuonDimensionNumbers(-1, (-3, -2)),
    "z_weight": MuonDimensionNumbers(-1, (-3, -2)),
    "out_weight": MuonDimensionNumbers((-2, -1), -3),
    "o_weight": MuonDimensionNumbers((-2, -1), -3),
    "fc_weight": MuonDimensionNumbers((-2, -1), -3),
    "up_weight": MuonDimensionNumbers(-1, -2),
    "down_weight": MuonDimensionNumbers(-1, -2),
}


def _matrix(path: tuple[Any, ...], _: Any) -> MuonDimensionNumbers | None:
    names = [str(getattr(key, "key", key)) for key in path]
    if names[-1] == "gate_weight":
        # The feed-forward's gate is a matrix, the attention's has heads.
        return MATRICES["up_weight"] if "mlp" in names else MATRICES["q_weight"]
    return MATRICES.get(names[-1])


def optimizer(schedule: Schedule) -> optax.GradientTransformation:
    """Muon for the matrices, Adam for the rest; weight decay on the matrices only."""

    def rate(peak: float) -> Callable[[Array], Array]:
        return lambda step: peak * schedule.scale(step)

    def matrices(parameters: Parameters) -> Any:
        return jax.tree_util.tree_map_with_path(_matrix, parameters)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        muon(
            rate(schedule.learning_rate),
            adam_learning_rate=rate(schedule.adam_learning_rate),
            adam_b2=0.98,
            weight_decay=0.01,
            adam_weight_decay=0.0,
            muon_weight_dimension_numbers=matrices,
        ),
    )


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def train_step(
    graphdef: nnx.GraphDef,
    schedule: Schedule,
    parameters: Parameters,
    optimizer_state: optax.OptState,
    tokens: Int[Array, "batch time"],
    segment_ids: Int[Array, "batch time"],
    weights: Float[Array, "batch time"],
) -> tuple[Parameters, optax.OptState, dict[str, Float[Array, ""]]]:
    """One step down."""
    gradients, measures = jax.grad(loss, has_aux=True)(parameters, graphdef, tokens, segment_ids, weights)
    updates, optimizer_state = optimizer(schedule).update(gradients, optimizer_state, parameters)
    measures["gradient_norm"] = optax.global_norm(gradients)
    return optax.apply_updates(parameters, updates), optimizer_state, measures


@functools.partial(jax.jit, static_argnums=0)
def predictions(
    graphdef: nnx.GraphDef,
    parameters: Parameters,
    tokens: Int[Array, "batch time"],
    segment_ids: Int[Array, "batch time"],
) -> tuple[Int[Array, "batch time"], Float[Array, "batch time"], Int[Array, "batch time"]]:
    """For each token of documents: what the model would have said, the loss, and what the MTP head would have said."""
    model = nnx.merge(graphdef, parameters)
    hidden, _ = model(tokens, segment_ids=segment_ids)
    logits = model.logits(hidden[:, :-1])
    said = jnp.pad(jnp.argmax(logits, -1), ((0, 0), (1, 0)))
    losses = jnp.pad(cross_entropy(logits, tokens[:, 1:]), ((0, 0), (1, 0)))
    drafted = model.logits(model.draft_hidden(hidden, tokens, segment_ids=segment_ids)[:, :-1])
    return said, losses, jnp.pad(jnp.argmax(drafted, -1), ((0, 0), (2, 0)))
