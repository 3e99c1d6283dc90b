"""The numbers of a run, a JSON object a line: one for each step, each evaluation and each set of answers.

A step's line has

- `step`, `loss` (what is minimized), `cross_entropy` in nats and `accuracy` of the tokens learned, `mtp_cross_entropy`
  and `mtp_accuracy` where the multi-token-prediction head is trained;
- `learning_rate`, and `gradient_norm` before clipping;
- `tokens` that are no padding, `tokens_per_second` and `seconds`, in which the first step of a process also compiles;
- `flops_per_second` that the model needs, see `qwen35_jax.training.flops`, `utilization`, which is their share of what
  the devices can do, where that is known, and `memory_bytes`.

An evaluation's line has `step`, `evaluation_cross_entropy`, `evaluation_accuracy` and `seconds`; one of answers has
`step` and `answers`, a list of objects with `question` and `answer`.

A run on pairs of answers has in the place of `cross_entropy` the measures of `PreferenceMeasures`, among them the
`accuracy` and `margin` of its pairs, and an evaluation's line has `evaluation_loss`, `evaluation_accuracy` and
`evaluation_margin`.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwen35_jax.errors import CheckpointError


class Metrics:
    """The lines of a run, which goes on after the steps of the checkpoint that the run goes on from.

    By itself it writes none: of several processes one does, with a `MetricsFile`, and the others remember.

    Args:
        path: of the file. Lines of later steps do not count, as these steps are done again, and neither does a last
            line that a killed process left unfinished.
        after: steps done.

    Attributes:
        lines: all of the run so far.
    """

    def __init__(self, path: Path, *, after: int):
        self.lines = [line for line in _read(path) if line["step"] <= after]

    def append(self, line: Mapping[str, Any]) -> None:
        """Takes a line."""
        self.lines.append(dict(line))

    def close(self) -> None:
        """Ends it."""


class MetricsFile(Metrics):
    """The file of a run, rid of the lines that do not count. Arguments and attributes as for `Metrics`."""

    def __init__(self, path: Path, *, after: int):
        super().__init__(path, after=after)
        whole = path.with_name(path.name + ".partial")
        whole.write_text("".join(map(_text, self.lines)), encoding="utf-8")
        os.replace(whole, path)
        self._path = path
        self._file = path.open("ab", buffering=0)  # nothing is left to be written when it is closed

    def append(self, line: Mapping[str, Any]) -> None:
        """Writes a line at once, so that whoever follows the file sees it.

        Raises:
            CheckpointError: it cannot be written whole, since the disk is full, say.
        """
        super().append(line)
        text = _text(line).encode()
        try:
            written = self._file.write(text)
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be written: {error.strerror}") from error
        if written < len(text):
            raise CheckpointError(f"{self._path}: cannot be written: {os.strerror(errno.ENOSPC)}")

    def close(self) -> None:
        self._file.close()


def memory_bytes(device: Any) -> int:
    """The most memory of a JAX device that was in use so far; of this process where the device does not tell."""
    statistics = device.memory_stats()
    if statistics and "peak_bytes_in_use" in statistics:
        return statistics["peak_bytes_in_use"]
    # In KiB, but bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _read(path: Path) -> list[dict[str, Any]]:
    lines = []
    if path.is_file():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                break
            lines.append(line)
    return lines


def _text(line: Mapping[str, Any]) -> str:
    return json.dumps(line) + "\n"
