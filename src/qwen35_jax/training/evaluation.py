"""The loss of a model on data that it does not learn from."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from qwen35_jax.model import Parameters
from qwen35_jax.training.objective import Batch, Objective, Totals, batch_loss, totals_of


class Evaluation(NamedTuple):
    """Means over all tokens that are learned.

    Attributes:
        cross_entropy: of the next token, in nats.
        accuracy: share of the targets that have the largest logit.
        targets: so many tokens.
    """

    cross_entropy: float
    accuracy: float
    targets: float


def evaluate(graphdef: nnx.GraphDef, parameters: Parameters, batches: Iterable[Batch]) -> Evaluation:
    """Measures a model.

    Args:
        graphdef: of the model.
        parameters: of the model.
        batches: of one micro-batch each, on the devices, all of one shape.
    """
    cross_entropy = accuracy = targets = 0.0
    for batch in batches:
        sums = jax.device_get(_sums(graphdef, parameters, batch))
        cross_entropy, accuracy, targets = (
            total + float(share)
            for total, share in zip((cross_entropy, accuracy, targets), sums, strict=True)
        )
    return Evaluation(cross_entropy / max(targets, 1), accuracy / max(targets, 1), targets)


@functools.partial(jax.jit, static_argnums=0)
def _sums(
    graphdef: nnx.GraphDef, parameters: Parameters, batch: Batch
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Cross-entropy, right answers and targets of a batch, all summed: a share of one is the sum itself."""
    one = Totals(jnp.float32(1), jnp.float32(1))
    rows = jax.tree.map(lambda array: array[0], batch)
    _, measures = batch_loss(parameters, graphdef, rows, one, Objective(rematerialize="none"))
    return measures.cross_entropy, measures.accuracy, totals_of(rows).next_token
