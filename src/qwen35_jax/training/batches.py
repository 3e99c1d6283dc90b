"""The batches of a training run: in order, cut among processes, and resumable at every step. Needs the `train` extra.

Grain gives the order of the rows: shuffled by seed and epoch, or as they are, epochs after each other without end, so
that a step at the end of one takes what it lacks from the next. The order belongs to the run, not to a process. A
step's rows are the same on any number of processes, and each makes only those that it holds, which the mesh decides,
see `qwen35_jax.training.placement.held_rows`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

import grain
import numpy as np
from jaxtyping import Int

from qwen35_jax.errors import ConfigError
from qwen35_jax.training.packing import NO_ROW
from qwen35_jax.training.records import DataError

AnyBatch = TypeVar("AnyBatch", covariant=True)


class Rows(Protocol[AnyBatch]):
    """The rows of a data set, as `PackedRows` has them."""

    def __len__(self) -> int: ...

    def batch(self, indices: Int[np.ndarray, "micro_batches rows"]) -> AnyBatch:
        """Rows by their indices, where `NO_ROW` stands for one of padding, as NumPy arrays [micro_batches rows ...]."""
        ...

    def fingerprint(self) -> str:
        """A text that is the same only for the same rows."""
        ...


class Batches(Iterator[AnyBatch], Generic[AnyBatch]):
    """The steps of a run, without end, for one process.

    Each is a batch of NumPy arrays [micro_batches, rows of this process, ...].

    Args:
        packed: all rows of the data set; the same on every process.
        micro_batches: of a step.
        rows: of a micro-batch, those of all processes together.
        seed: of the order, from 0 to 2**32 - 1; None for the rows as they follow each other, in every epoch.
        held: indices of those rows of a micro-batch that this process holds; all of them by default.

    Attributes:
        steps_per_epoch: steps in which every row is given once; seldom a whole number.

    Raises:
        ConfigError: a number is out of range.
        DataError: there are no rows.
    """

    def __init__(
        self,
        packed: Rows[AnyBatch],
        *,
        micro_batches: int,
        rows: int,
        seed: int | None,
        held: Int[np.ndarray, " held"] | None = None,
    ):
        _check(packed, micro_batches, rows)
        own_rows = slice(None) if held is None else held
        if seed is not None and not 0 <= seed < 2**32:
            raise ConfigError(f"seed is {seed}, expected a number from 0 to 2**32 - 1")
        rows_per_step = micro_batches * rows
        self.steps_per_epoch = len(packed) / rows_per_step
        # What the order depends on, and so a position in it: not processes, nor how a step is cut into micro-batches.
        self._order = {"data": packed.fingerprint(), "seed": seed, "rows_per_step": rows_per_step}

        def own(indices: Int[np.ndarray, " rows_per_step"]) -> AnyBatch:
            return packed.batch(indices.reshape(micro_batches, rows)[:, own_rows])

        order = grain.MapDataset.range(len(packed))
        if seed is not None:
            order = order.shuffle(seed=seed)
        steps = order.repeat().batch(rows_per_step).map(own)
        # A step is made in milliseconds, so one thread keeps ahead of the device; each step held takes memory.
        self._steps = iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))

    def __next__(self) -> AnyBatch:
        return next(self._steps)

    def get_state(self) -> dict[str, Any]:
        """The position, as JSON can hold it: after the step that was given last, whatever was made ahead."""
        return {"order": dict(self._order), "position": self._steps.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a position that was saved, by however many processes.

        Raises:
            DataError: it belongs to other data, another seed or another size of a step; names which.
        """
        saved = state.get("order", {})
        for name, value in self._order.items():
            if saved.get(name) != value:
                raise DataError(
                    f"the saved position in the data has {name} {saved.get(name)!r}, and this run {value!r}: go on "
                    "with the data and settings of then, or start a new run"
                )
        self._steps.set_state(dict(state["position"]))


def single_pass(
    packed: Rows[AnyBatch], *, micro_batches: int, rows: int, held: Int[np.ndarray, " held"] | None = None
) -> Iterator[AnyBatch]:
    """Every row once and in order, as an evaluation goes through them; the last batch is filled up with padding.

    Arguments and errors as for `Batches`. All processes get the same number of batches.
    """
    _check(packed, micro_batches, rows)
    rows_per_step = micro_batches * rows
    indices = np.arange(-(-len(packed) // rows_per_step) * rows_per_step)
    indices[len(packed) :] = NO_ROW
    own_rows = slice(None) if held is None else held
    return (packed.batch(each[:, own_rows]) for each in indices.reshape(-1, micro_batches, rows))


def _check(packed: Rows[Any], micro_batches: int, rows: int) -> None:
    if not len(packed):
        raise DataError("there are no rows to make batches of")
    for name, value in (("micro_batches", micro_batches), ("rows", rows)):
        if value < 1:
            raise ConfigError(f"{name} is {value}, expected at least 1")
