"""How a run of `qwen35 train` shows on standard error: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from qwen35_jax.training.watcher import Watcher

SECONDS_BETWEEN_LINES = 5.0


@contextlib.contextmanager
def training_progress() -> Iterator[Watcher]:
    """What shows the run within the block."""
    if not sys.stderr.isatty():
        yield TrainingLines()
        return
    bar = TrainingBar(Console(stderr=True))
    try:
        yield bar
    finally:
        bar.stop()


class TrainingLines(Watcher):
    """A line for every evaluation, for answers and the last step; of other steps no more than one in five seconds."""

    def __init__(self) -> None:
        self._told = -SECONDS_BETWEEN_LINES
        self._steps = 0

    def started(self, *, done: int, steps: int) -> None:
        self._steps = steps
        if done < steps:
            self.note(f"{steps - done:,} steps; the first one compiles")

    def line(self, line: dict[str, Any]) -> None:
        now = time.monotonic()
        if "loss" not in line or line["step"] == self._steps or now - self._told >= SECONDS_BETWEEN_LINES:
            self._told = now
            self.note(line_for_people(line))

    def note(self, text: str) -> None:
        print(f"qwen35: {text}", file=sys.stderr, flush=True)


class TrainingBar(Watcher):
    """A bar with the numbers of the last step and the time left; evaluations, answers and notes stay above it."""

    def __init__(self, console: Console):
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps, {task.fields[numbers]}, left"),
            TimeRemainingColumn(),
        )
        self._console = console
        self._bar = Progress(*columns, console=console)
        self._task = self._bar.add_task("training", total=None, start=False, numbers="compiling")

    def started(self, *, done: int, steps: int) -> None:
        self._bar.update(self._task, total=steps, completed=done)
        self._bar.start()
        self._bar.start_task(self._task)

    def line(self, line: dict[str, Any]) -> None:
        if "loss" in line:
            self._bar.update(self._task, completed=line["step"], numbers=_numbers(line))
        else:
            self.note(line_for_people(line))

    def note(self, text: str) -> None:
        self._console.print(escape(text), highlight=False)

    def stop(self) -> None:
        """Leaves the bar as it is."""
        self._bar.stop()


def line_for_people(line: dict[str, Any]) -> str:
    """A line of `metrics.jsonl` in words."""
    if "loss" in line:
        return f"step {line['step']:,}: {_numbers(line)}"
    if "answers" in line:
        pairs = "; ".join(f"{pair['question']!r} is answered {pair['answer']!r}" for pair in line["answers"])
        return f"step {line['step']:,}: {pairs}"
    evaluation = {name.removeprefix("evaluation_"): value for name, value in line.items()}
    return f"step {line['step']:,}: evaluation {_measured(evaluation)}"


def _numbers(line: dict[str, Any]) -> str:
    share = f" ({line['utilization']:.0%})" if "utilization" in line else ""
    return (
        f"{_measured(line)}, {line['tokens_per_second']:,.0f} tokens/s, "
        f"{line['flops_per_second'] / 1e12:,.3g} TFLOP/s{share}, {line['memory_bytes'] / 2**30:.1f} GiB"
    )


def _measured(line: dict[str, Any]) -> str:
    if "cross_entropy" in line:
        return f"{line['cross_entropy']:.4f} nats a token, {line['accuracy']:.1%} right"
    return f"loss {line['loss']:.4f}, {line['accuracy']:.1%} of pairs right, margin {line['margin']:.3f}"
