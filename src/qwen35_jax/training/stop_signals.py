"""Signals that end a run after the step in hand: SIGTERM, with which machines are taken away, and Ctrl-C."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Iterator
from typing import Any

from qwen35_jax.training.processes import largest


@dataclasses.dataclass
class StopRequest:
    """Whether the run is to end.

    Attributes:
        signal: that asked for it, in this process or as agreed; None as long as none did.
    """

    signal: signal.Signals | None = None

    def agree(self) -> None:
        """Tells a request to all processes, so that they end after the same step. All have to call it after each."""
        if number := largest(self.signal or 0):
            self.signal = signal.Signals(number)


@contextlib.contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Within the block, the first signal only asks; a second one does what it did before the block.

    Outside of the main thread, where Python lets nobody handle signals, none ever asks.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {}

    def put_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def ask(number: int, frame: Any) -> None:
        request.signal = signal.Signals(number)
        put_back()

    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, ask)
    try:
        yield request
    finally:
        put_back()
