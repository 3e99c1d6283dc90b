"""What a run on pairs does before its first step: it asks the reference, or finds what it said when the run began."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from jaxtyping import Float

from qwen35_jax.model import Parameters
from qwen35_jax.training.batches import single_pass
from qwen35_jax.training.packing import PackedRows
from qwen35_jax.training.placement import place_batch
from qwen35_jax.training.preference.reference import (
    load_reference,
    reference_log_probabilities,
    save_reference,
)
from qwen35_jax.training.preference.rows import ReferencedRows
from qwen35_jax.training.preparation import PreparedRun, make_batches
from qwen35_jax.training.processes import is_first
from qwen35_jax.training.settings import TrainingSettings

REFERENCE = "reference.npz"


def with_reference(
    run: PreparedRun, settings: TrainingSettings, parameters: Parameters, output: Path, *, resumed: bool
) -> PreparedRun:
    """The run with rows that hold what the reference says of their answers.

    Of the training data it is asked once for a run. A run that was ended before its first checkpoint begins anew, and
    asks anew. Of the evaluation data, which may change on the way, it is asked at every start.

    Args:
        run: of `prepare`, at its position in the data.
        settings: of the run.
        parameters: of the model that the run began with, without any adapter.
        output: folder of the run.
        resumed: whether it goes on from a checkpoint.

    Raises:
        CheckpointError: what the reference said cannot be written, or found.
    """

    def ask(packed: PackedRows) -> Float[np.ndarray, " documents"]:
        rows = single_pass(packed, micro_batches=1, rows=run.rows, held=run.held)
        placed = (place_batch(run.mesh, batch) for batch in rows)
        return reference_log_probabilities(run.graphdef, parameters, packed, placed)

    if resumed:
        found = load_reference(output / REFERENCE, run.train_rows)
    else:
        found = ask(run.train_rows)
        if is_first():
            save_reference(output / REFERENCE, run.train_rows, found)
    batches = make_batches(settings, ReferencedRows(run.train_rows, found), run.rows, run.held)
    batches.set_state(run.batches.get_state())
    evaluation = run.evaluation_rows
    if isinstance(evaluation, PackedRows):
        evaluation = ReferencedRows(evaluation, ask(evaluation))
    return dataclasses.replace(run, batches=batches, evaluation_rows=evaluation)
