"""How well a model tells chosen from rejected answers that it does not learn from."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from qwen35_jax.model import Parameters
from qwen35_jax.training.preference.objective import (
    Preference,
    PreferenceBatch,
    PreferenceMeasures,
    PreferenceTotals,
)


class PreferenceEvaluation(NamedTuple):
    """Means over all pairs, see `PreferenceMeasures`.

    Attributes:
        loss: what a step would minimize.
        accuracy: share of the pairs of which the chosen answer has the larger reward.
        margin: of the rewards.
        pairs: so many.
    """

    loss: float
    accuracy: float
    margin: float
    pairs: float


def evaluate_preferences(
    graphdef: nnx.GraphDef, parameters: Parameters, batches: Iterable[PreferenceBatch], preference: Preference
) -> PreferenceEvaluation:
    """Measures a model.

    Args:
        graphdef: of the model.
        parameters: of the model.
        batches: `single_pass` over `ReferencedRows`, of one micro-batch each, on the devices.
        preference: what is measured.
    """
    loss = accuracy = margin = pairs = 0.0
    for batch in batches:
        measures, totals = jax.device_get(_sums(graphdef, parameters, batch, preference))
        loss, accuracy = loss + float(measures.loss), accuracy + float(measures.accuracy)
        margin, pairs = margin + float(measures.margin), pairs + float(totals.pairs)
    count = max(pairs, 1)
    return PreferenceEvaluation(loss / count, accuracy / count, margin / count, pairs)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _sums(
    graphdef: nnx.GraphDef, parameters: Parameters, batch: PreferenceBatch, preference: Preference
) -> tuple[PreferenceMeasures, PreferenceTotals]:
    """Measures of a batch, summed over its pairs: a share of one is the sum itself."""
    rows = jax.tree.map(lambda array: array[0], batch)
    _, measures = preference.loss(parameters, graphdef, rows, PreferenceTotals(jnp.float32(1)))
    return measures, preference.totals_of(rows)
