"""The numbers of a run for TensorBoard. Needs tensorboardX, of the `train` extra."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwen35_jax.errors import ConfigError


def check_tensorboard() -> None:
    """Raises `ConfigError` where tensorboardX is not installed."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise ConfigError(
            "run.tensorboard is true, which needs tensorboardX: pip install 'qwen35-jax[train]'"
        )


class TensorBoardFile:
    """Event files in a folder, which `tensorboard --logdir` shows.

    Args:
        folder: is made if need be. One that holds a run goes on with it.
        after: steps done. What the files have of later ones is hidden, as these steps are done again.
    """

    def __init__(self, folder: Path, *, after: int):
        from tensorboardX import SummaryWriter

        # A file is named after the second in which it was begun, and would replace one of the same second.
        self._writer = SummaryWriter(str(folder), purge_step=after + 1, filename_suffix=f".{after}")

    def append(self, line: Mapping[str, Any]) -> None:
        """Writes a line of `metrics.jsonl`: each number under its name, and answers as text."""
        step = line["step"]
        for name, value in line.items():
            if name == "answers":
                text = "\n\n".join(f"**{pair['question']}** {pair['answer']}" for pair in value)
                self._writer.add_text(name, text, step)
            elif name not in ("step", "seconds"):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Ends it, once all is on the disk."""
        self._writer.close()
