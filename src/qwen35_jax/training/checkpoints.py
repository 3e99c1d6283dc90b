"""Checkpoints of a run: everything that the next start needs to go on as if nothing had happened.

A checkpoint is an Orbax folder named after its step. `state` holds the arrays, each under the path that leads to it in
`TrainState`; `run` the settings and the position in the data, as JSON. It is written under another name, beside the
training, and renamed once it is complete: what a killed process leaves behind is no checkpoint, and is removed by the
next start. Arrays come back onto whatever mesh the new run has, and onto however many processes: each of them writes
and reads what it holds, in one folder on a disk that they share, and does what is done here when the others do.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from qwen35_jax.errors import CheckpointError
from qwen35_jax.training.processes import is_first
from qwen35_jax.training.train_step import TrainState

STATE, RUN = "state", "run"
_UNFINISHED = ".orbax-checkpoint-tmp"


class Saved(NamedTuple):
    """What a checkpoint holds beside its arrays.

    Attributes:
        step: optimizer steps done.
        settings: of the run, from `as_tables`.
        position: in the data, from `Batches.get_state`.
    """

    step: int
    settings: Mapping[str, Any]
    position: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of a run, in one folder. Close it, or use it as a context: that waits for the last one.

    Args:
        folder: is made if need be. Unfinished checkpoints in it are removed.
        keep: so many of the newest stay.
    """

    def __init__(self, folder: Path, *, keep: int):
        self.folder = folder.absolute()
        if is_first():
            for unfinished in self.folder.glob(f"*{_UNFINISHED}"):
                shutil.rmtree(unfinished, ignore_errors=True)
        # Where the folder cannot be made, its making in the background is found out about after minutes.
        in_background = ocp.AsyncOptions(create_directories_asynchronously=False)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, async_options=in_background)
        handlers = {STATE: ocp.StandardCheckpointHandler(), RUN: ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)
        if not self.folder.is_dir():
            raise CheckpointError(
                f"{self.folder} was made by process 0, but is not seen by process {jax.process_index()}: run.output "
                "has to be on a disk that all processes share"
            )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except CheckpointError:
            if error is None:
                raise
        finally:
            self._manager.close()

    def latest(self) -> Saved | None:
        """The newest complete checkpoint, without its arrays; None where there is none.

        Raises:
            CheckpointError: it cannot be read.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        try:
            run = self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))[RUN]
            return Saved(step, run["settings"], run["position"])
        except (ValueError, OSError, KeyError, TypeError) as error:
            raise self._damaged(step, error) from error

    def save(self, state: TrainState, settings: Mapping[str, Any], position: Mapping[str, Any]) -> None:
        """Begins to write a checkpoint. The arrays may be given away once this returns; the disk is waited for later.

        Args:
            state: what a step returned.
            settings: from `as_tables`.
            position: in the data, after the steps that the state has done.

        Raises:
            CheckpointError: this one cannot be begun, or the one before it could not be written.
        """
        step = int(state.step)
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(_named(state)),
            run=ocp.args.JsonSave({"settings": dict(settings), "position": dict(position)}),
        )
        try:
            self._manager.save(step, args=items)
        except (ValueError, RuntimeError, OSError) as error:
            raise self._unwritable(error) from error

    def wait(self) -> None:
        """Returns when what was begun is complete.

        Raises:
            CheckpointError: it could not be written.
        """
        try:
            self._manager.wait_until_finished()
        except (ValueError, RuntimeError, OSError) as error:
            raise self._unwritable(error) from error

    def restore(self, step: int, shapes: TrainState) -> TrainState:
        """The arrays of a checkpoint.

        Args:
            step: of a complete one.
            shapes: what a state is here: shapes, dtypes and shardings, which may be others than those of then.

        Raises:
            CheckpointError: the checkpoint lacks an array or has one more, or one of another shape or dtype, all of
                which is found before any is read; or a file is damaged.
        """
        wanted = _named(shapes)
        try:
            metadata: Any = self._manager.item_metadata(step)[STATE]
            found = metadata.tree
        except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(step, error) from error
        self._check(step, found, wanted)
        try:
            restored = self._manager.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted))
            )[STATE]
        except (ValueError, OSError) as error:
            raise self._damaged(step, error) from error
        leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
        arrays = [
            jax.random.wrap_key_data(restored[_name(path)]) if _is_key(leaf) else restored[_name(path)]
            for path, leaf in leaves
        ]
        return jax.tree.unflatten(structure, arrays)

    def _check(self, step: int, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        for name in sorted(wanted.keys() | found.keys()):
            place = f"{self.folder / str(step)}: '{name}'"
            if name not in found:
                raise CheckpointError(f"{place} is missing, and the run cannot go on without it")
            if name not in wanted:
                raise CheckpointError(
                    f"{place} belongs to no part of this run: go on with the settings of then, or choose another "
                    "run.output"
                )
            stored, asked = found[name], wanted[name]
            if tuple(stored.shape) != asked.shape or np.dtype(stored.dtype) != asked.dtype:
                raise CheckpointError(
                    f"{place} is {stored.dtype} {list(stored.shape)}, expected {asked.dtype} {list(asked.shape)}"
                )

    def _damaged(self, step: int, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self.folder / str(step)} cannot be read ({_first_line(error)}): remove it to go on from the one before"
        )

    def _unwritable(self, error: Exception) -> CheckpointError:
        # Orbax and TensorStore tell of the system's errors in the text of their own.
        full = os.strerror(errno.ENOSPC) in str(error)
        reason = "the disk is full" if full else _first_line(error)
        return CheckpointError(
            f"{self.folder}: a checkpoint could not be written: {reason}; the complete ones before it are there"
        )


def _named(state: TrainState) -> dict[str, Any]:
    """The arrays, or their shapes, by the paths that lead to them; of a random key, its numbers."""
    return {
        _name(path): _key_data(leaf) if _is_key(leaf) else leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_data(key: Any) -> Any:
    if isinstance(key, jax.Array):
        return jax.random.key_data(key)
    numbers = jax.eval_shape(jax.random.key_data, key)
    return jax.ShapeDtypeStruct(numbers.shape, numbers.dtype, sharding=key.sharding)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
