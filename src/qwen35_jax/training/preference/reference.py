"""What the reference says of the answers: asked once, before the first step, and kept in a file.

The reference is the model that a run begins with. Asked again at every step it would take the time of another forward
pass and, where all parameters are trained, the memory of a second model.
"""

from __future__ import annotations

import functools
import itertools
import os
import zipfile
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from qwen35_jax.errors import CheckpointError
from qwen35_jax.model import Parameters
from qwen35_jax.training.objective import Batch
from qwen35_jax.training.packing import PackedRows
from qwen35_jax.training.preference.objective import answers_of


def reference_log_probabilities(
    graphdef: nnx.GraphDef, parameters: Parameters, packed: PackedRows, batches: Iterable[Batch]
) -> Float[np.ndarray, " documents"]:
    """The log-probability of each answer, in the order of the documents.

    Args:
        graphdef: of the model.
        parameters: of the reference, without any adapter.
        packed: from `pack_pairs`.
        batches: `single_pass` over `packed`, of one micro-batch each, on the devices. Over a mesh, this runs under
            `jax.set_mesh`.
    """
    sums = (np.asarray(_sums(graphdef, parameters, batch, packed.most_documents)) for batch in batches)
    found = None
    for documents, row in zip(
        packed.rows, itertools.chain.from_iterable(sums), strict=False
    ):  # then rows of padding
        if found is None:
            found = np.empty(len(packed.documents), row.dtype)
        found[documents] = row[: len(documents)]
    assert found is not None, "there are rows"
    return found


@functools.partial(jax.jit, static_argnums=(0, 3))
def _sums(
    graphdef: nnx.GraphDef, parameters: Parameters, batch: Batch, documents: int
) -> Float[Array, "batch documents"]:
    rows = jax.tree.map(lambda array: array[0], batch)
    found = answers_of(parameters, graphdef, rows, documents, rematerialize="none").log_probability
    if jax.sharding.get_abstract_mesh().empty:
        return found
    return jax.lax.with_sharding_constraint(found, PartitionSpec())  # every process reads all of it


def save_reference(path: Path, packed: PackedRows, found: Float[np.ndarray, " documents"]) -> None:
    """Writes what was found, whole or not at all.

    Raises:
        CheckpointError: it cannot be written, since the disk is full, say.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            np.savez(file, data=np.array(packed.fingerprint()), log_probabilities=found)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}") from error


def load_reference(path: Path, packed: PackedRows) -> Float[np.ndarray, " documents"]:
    """What `save_reference` wrote.

    Raises:
        CheckpointError: the file is missing, damaged, or of other data.
    """
    try:
        with np.load(path) as file:
            data, found = str(file["data"]), file["log_probabilities"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error}), and the run cannot go on without the log-probabilities of its "
            "reference: start a new run"
        ) from error
    if data != packed.fingerprint():
        raise CheckpointError(f"{path}: is of other data than the run has now: go on with those of then")
    return found
