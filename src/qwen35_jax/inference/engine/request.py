"""What a client hands to an engine, and the stream of tokens that it gets back."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator

from qwen35_jax.inference.constraint import Constraint
from qwen35_jax.inference.results import Generation, TokenEvent
from qwen35_jax.inference.settings import GenerationSettings


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
        prompt: token ids, at least one.
        settings: how to continue it.
        stop_ids: ids that end the answer, 8 at most.
        constraint: what the answer has to look like, see `Constraint`; it serves one request.
    """

    prompt: tuple[int, ...]
    settings: GenerationSettings = dataclasses.field(default_factory=GenerationSettings)
    stop_ids: tuple[int, ...] = ()
    constraint: Constraint | None = None


class AnswerStream:
    """The answer to one request while it is drawn: iterate over it, or wait for the whole with `result`.

    Tokens wait here until they are read, and a reader who goes away stops nothing: call `cancel`, or use the stream
    as a context manager, which cancels what is not finished at its end.

    Attributes:
        number: of the request, counted from 0.
    """

    def __init__(self, number: int, wake: Callable[[], None], notify: Callable[[], None] = lambda: None):
        self.number = number
        self._notify = notify
        self._wake = wake
        self._events: queue.SimpleQueue[TokenEvent | None] = queue.SimpleQueue()
        self._finished = threading.Event()
        self._cancelled = False
        self._outcome: Generation | BaseException | None = None

    def __iter__(self) -> Iterator[TokenEvent]:
        """Events as they come; the last one has a finish reason. May be iterated once.

        Raises:
            NonFiniteError: the model broke on this request.
            RuntimeError: the engine was closed, or broke.
        """
        while (event := self._events.get()) is not None:
            yield event
        if isinstance(self._outcome, BaseException):
            raise self._outcome

    def poll(self) -> list[TokenEvent]:
        """The events that have come since the last call, without waiting; for a reader with a loop of its own.

        The last event has a finish reason. Errors are told by `result`, once the stream is `finished`.
        """
        events = []
        with contextlib.suppress(queue.Empty):
            while (event := self._events.get_nowait()) is not None:
                events.append(event)
        return events

    def result(self, timeout: float | None = None) -> Generation:
        """Waits for the whole answer. A cancelled request gives what it had drawn.

        Raises:
            TimeoutError: it took longer than `timeout` seconds. The request goes on.
            NonFiniteError, RuntimeError: as in iterating.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"request {self.number} has not finished within {timeout} seconds")
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    def cancel(self) -> None:
        """Ends the request, wherever it stands. Its slot is free soon after."""
        self._cancelled = True
        self._wake()

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    @property
    def finished(self) -> bool:
        return self._finished.is_set()

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.finished:
            self.cancel()

    def put(self, event: TokenEvent) -> None:
        """For the engine: passes an event on."""
        self._events.put(event)
        self._notify()

    def finish(self, outcome: Generation | BaseException) -> None:
        """For the engine: ends the stream."""
        self._outcome = outcome
        self._finished.set()
        self._events.put(None)
        self._notify()
