"""What direct preference optimization minimizes."""

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
from qwen35_jax.training.log_probabilities import log_probabilities
from qwen35_jax.training.objective import Batch, targets_of


class PreferenceBatch(NamedTuple):
    """Rows of packed pairs. Every document is an answer with its prompt; an odd one is chosen, and the next rejected.

    Attributes:
        tokens: ids.
        segment_ids: 0 marks padding, 1 and 2 are the first pair of a row, 3 and 4 the second.
        weights: 1 at the tokens of answers, else 0.
        reference: log-probability of each answer under the reference, of document 1 first; 0 where there is none.
    """

    tokens: Int[Array, "*micro_batches batch time"]
    segment_ids: Int[Array, "*micro_batches batch time"]
    weights: Float[Array, "*micro_batches batch time"]
    reference: Float[Array, "*micro_batches batch documents"]


class PreferenceTotals(NamedTuple):
    """What the loss of an optimizer step is divided by, whatever its micro-batches and devices.

    Attributes:
        pairs: in the step.
    """

    pairs: Float[Array, ""]


class PreferenceMeasures(NamedTuple):
    """What a step tells of its batch: means over its pairs.

    The reward of an answer is beta times its log-probability less that under the reference.

    Attributes:
        loss: what is minimized.
        accuracy: share of the pairs of which the chosen answer has the larger reward.
        margin: reward of the chosen answer minus that of the rejected one.
        chosen_reward: of the chosen answer.
        rejected_reward: of the rejected answer.
        chosen_log_probability: of the chosen answer as a whole, in nats.
        rejected_log_probability: the same of the rejected one.
    """

    loss: Float[Array, ""]
    accuracy: Float[Array, ""]
    margin: Float[Array, ""]
    chosen_reward: Float[Array, ""]
    rejected_reward: Float[Array, ""]
    chosen_log_probability: Float[Array, ""]
    rejected_log_probability: Float[Array, ""]


class Answers(NamedTuple):
    """Sums over the answers of rows.

    Attributes:
        log_probability: of all tokens of the answer together, in nats.
        tokens: in the answer; 0 where a row has no such document.
    """

    log_probability: Float[Array, "batch documents"]
    tokens: Float[Array, "batch documents"]


@dataclasses.dataclass(frozen=True)
class Preference:
    """Direct preference optimization.

    Of a pair with margin m, the reward of the chosen answer minus that of the rejected one, the loss is

        -(1 - label_smoothing) log sigmoid(m) - label_smoothing log sigmoid(-m) - chosen_weight log p(chosen) / tokens

    Attributes:
        beta: scale of the rewards. The larger, the closer the model stays to the reference.
        label_smoothing: share of the pairs that may be the wrong way round (Mitchell 2023, "A note on DPO with noisy
            preferences").
        chosen_weight: of the next-token loss on the chosen answer, a mean over its tokens, which keeps its probability
            from falling together with that of the rejected one (Pang et al. 2024, "Iterative Reasoning Preference
            Optimization").
        rematerialize: what the backward pass computes again.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    chosen_weight: float = 0.0
    rematerialize: Rematerialize = "all"

    def __post_init__(self) -> None:
        self._check("beta", 0 < self.beta < float("inf"), "a number above 0")
        self._check("label_smoothing", 0 <= self.label_smoothing < 0.5, "a number from 0 to below 0.5")
        self._check("chosen_weight", 0 <= self.chosen_weight < float("inf"), "a number of at least 0")

    def _check(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ConfigError(f"preference.{name} is {getattr(self, name)!r}, expected {expected}")

    def totals_of(self, batch: PreferenceBatch) -> PreferenceTotals:
        """The totals of a step whose batch this is, with all its micro-batches."""
        _, weights = _targets(batch)
        tokens = _by_document(weights, batch.segment_ids, batch.reference.shape[-1])
        return PreferenceTotals(_are_pairs(tokens).sum().astype(weights.dtype))

    def loss(
        self,
        parameters: Parameters,
        graphdef: nnx.GraphDef,
        batch: PreferenceBatch,
        totals: PreferenceTotals,
    ) -> tuple[Float[Array, ""], PreferenceMeasures]:
        """A micro-batch's share of the loss of its step, and of what is told of it; shares add up.

        Args:
            parameters: to differentiate in.
            graphdef: of the model.
            batch: one micro-batch.
            totals: of the whole step, from `totals_of`.
        """
        count = batch.reference.shape[-1]
        answers = answers_of(parameters, graphdef, batch, count, rematerialize=self.rematerialize)
        are_pairs = _are_pairs(answers.tokens)
        reference = batch.reference.astype(answers.log_probability.dtype)
        rewards = self.beta * (answers.log_probability - reference)
        margin = _chosen(rewards) - _rejected(rewards)
        loss = -(1 - self.label_smoothing) * jax.nn.log_sigmoid(margin)
        if self.label_smoothing:
            loss -= self.label_smoothing * jax.nn.log_sigmoid(-margin)
        if self.chosen_weight:
            mean = _chosen(answers.log_probability) / jnp.maximum(_chosen(answers.tokens), 1)
            loss -= self.chosen_weight * mean

        def share(values: Float[Array, "batch pairs"]) -> Float[Array, ""]:
            return jnp.sum(jnp.where(are_pairs, values, 0)) / jnp.maximum(totals.pairs, 1)

        measures = PreferenceMeasures(
            loss=share(loss),
            accuracy=share((margin > 0).astype(margin.dtype)),
            margin=share(margin),
            chosen_reward=share(_chosen(rewards)),
            rejected_reward=share(_rejected(rewards)),
            chosen_log_probability=share(_chosen(answers.log_probability)),
            rejected_log_probability=share(_rejected(answers.log_probability)),
        )
        return measures.loss, measures


def answers_of(
    parameters: Parameters,
    graphdef: nnx.GraphDef,
    batch: Batch | PreferenceBatch,
    documents: int,
    *,
    rematerialize: Rematerialize,
) -> Answers:
    """The log-probabilities of the answers in rows.

    Args:
        parameters: to differentiate in.
        graphdef: of the model.
        batch: one micro-batch.
        documents: of a row at most.
        rematerialize: what the backward pass computes again.
    """
    model = nnx.merge(graphdef, parameters)
    hidden, _ = model(batch.tokens, segment_ids=batch.segment_ids, rematerialize=rematerialize)
    targets, weights = _targets(batch)
    found = log_probabilities(hidden, model.head_weight, targets)
    weighted = jnp.where(weights == 0, 0, weights * found)
    return Answers(
        _by_document(weighted, batch.segment_ids, documents),
        _by_document(weights, batch.segment_ids, documents),
    )


def _targets(
    batch: Batch | PreferenceBatch,
) -> tuple[Int[Array, "*micro_batches batch time"], Float[Array, "*micro_batches batch time"]]:
    return targets_of(Batch(batch.tokens, batch.segment_ids, batch.weights), 1)


def _by_document(
    values: Float[Array, "*micro_batches batch time"],
    segment_ids: Int[Array, "*micro_batches batch time"],
    documents: int,
) -> Float[Array, "*micro_batches batch documents"]:
    # A comparison, which the compiler fuses into the sum: adding to where an index points has no fixed order on a GPU.
    inside = segment_ids[..., None] == jnp.arange(1, documents + 1)
    return jnp.sum(jnp.where(inside, values[..., None], 0), axis=-2)


def _are_pairs(tokens: Float[Array, "*batch documents"]) -> Array:
    """Which places of rows hold a pair."""
    return (_chosen(tokens) > 0) & (_rejected(tokens) > 0)


def _chosen(documents: Float[Array, "*batch documents"]) -> Float[Array, "*batch pairs"]:
    return documents[..., 0::2]


def _rejected(documents: Float[Array, "*batch documents"]) -> Float[Array, "*batch pairs"]:
    return documents[..., 1::2]
