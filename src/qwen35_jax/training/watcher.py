"""Who is told how a run goes."""

from __future__ import annotations

from typing import Any


class Watcher:
    """Is told what a run does; this one does nothing with it."""

    def started(self, *, done: int, steps: int) -> None:
        """The steps begin: so many of them are done already."""

    def line(self, line: dict[str, Any]) -> None:
        """A step, an evaluation or answers, as `metrics.jsonl` has them."""

    def note(self, text: str) -> None:
        """A line for people."""
