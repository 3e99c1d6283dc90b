"""Results that are made in a thread while earlier ones are used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def drawn_ahead(
    draw: Callable[[int], Result], steps: range, *, ahead: int = 4
) -> Iterator[tuple[int, Result]]:
    """Yields each step with what `draw` makes of it, in order, and draws the next `ahead` meanwhile.

    What `draw` raises is raised here, at its step.
    """
    waiting: deque[tuple[int, Future[Result]]] = deque()
    with ThreadPoolExecutor(max_workers=1) as thread:
        for step in steps:
            waiting.append((step, thread.submit(draw, step)))
            if len(waiting) > ahead:
                drawn, result = waiting.popleft()
                yield drawn, result.result()
        for drawn, result in waiting:
            yield drawn, result.result()
