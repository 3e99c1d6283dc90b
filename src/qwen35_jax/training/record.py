"""Where the lines of a run go: into its files, and to whoever watches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qwen35_jax.training.metrics import Metrics, MetricsFile
from qwen35_jax.training.processes import is_first
from qwen35_jax.training.tensorboard import TensorBoardFile
from qwen35_jax.training.watcher import Watcher

METRICS, TENSORBOARD = "metrics.jsonl", "tensorboard"


class Record:
    """Takes the lines of a run. Close it when the steps end.

    Args:
        output: folder of the run. Of several processes the first one writes there.
        after: steps done.
        tensorboard: write TensorBoard's files too.
        watcher: is told every line.
    """

    def __init__(self, output: Path, *, after: int, tensorboard: bool, watcher: Watcher):
        self._metrics = (MetricsFile if is_first() else Metrics)(output / METRICS, after=after)
        self._board = (
            TensorBoardFile(output / TENSORBOARD, after=after) if tensorboard and is_first() else None
        )
        self._watcher = watcher

    @property
    def lines(self) -> list[dict[str, Any]]:
        """All of the run so far, those of earlier starts included."""
        return self._metrics.lines

    def line(self, line: dict[str, Any]) -> None:
        """Takes a step, an evaluation or answers.

        Raises:
            CheckpointError: it cannot be written.
        """
        self._metrics.append(line)
        if self._board is not None:
            self._board.append(line)
        self._watcher.line(line)

    def close(self) -> None:
        """Ends the files."""
        self._metrics.close()
        if self._board is not None:
            self._board.close()
