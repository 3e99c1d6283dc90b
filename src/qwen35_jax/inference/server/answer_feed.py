"""Answers that an engine's thread draws, for a coroutine to read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from qwen35_jax.inference.engine import AnswerStream, Engine, Request
from qwen35_jax.inference.results import Generation, TokenEvent
from qwen35_jax.inference.server.api_error import unavailable


class AnswerFeed:
    """The answers to some requests, read together. To be made and read in an event loop, and closed by its reader.

    Args:
        engine: that answers.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._notified = False
        self._streams: list[AnswerStream] = []
        self._closed = False

    def submit(self, requests: Sequence[Request]) -> None:
        """Hands the requests to the engine; from any thread.

        Raises:
            QueueFullError: not all of them are taken on. Those that were end when the feed is closed.
            PromptError: see `Engine.submit`.
            ApiError: the engine takes no more requests.
        """
        try:
            for request in requests:
                self._streams.append(self._engine.submit(request, notify=self._notify))
        except RuntimeError as error:
            raise unavailable(str(error)) from error
        finally:
            # The reader may have left before there was anything to close.
            if self._closed:
                self.close()

    def close(self) -> None:
        """Cancels what is not finished."""
        self._closed = True
        for stream in self._streams:
            if not stream.finished:
                stream.cancel()

    def cancel(self, index: int) -> None:
        """Cancels one of the requests."""
        self._streams[index].cancel()

    async def events(self, patience: float) -> AsyncIterator[list[tuple[int, TokenEvent | Generation]]]:
        """What has come, until every answer has: the index of its request with each token, and at last the whole.

        Args:
            patience: seconds after which an empty list comes, where there is nothing else to tell.

        Raises:
            NonFiniteError: see `AnswerStream`.
            ApiError: the engine broke.
        """
        open_streams = dict(enumerate(self._streams))
        while open_streams:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self._news.wait()
            self._news.clear()
            self._notified = False  # before anything is polled: what comes from here on tells of itself again
            found: list[tuple[int, TokenEvent | Generation]] = []
            for index, stream in list(open_streams.items()):
                finished = stream.finished  # asked first: then nothing comes after what is polled
                found += [(index, event) for event in stream.poll()]
                if finished:
                    found.append((index, _result(stream)))
                    del open_streams[index]
            yield found

    def _notify(self) -> None:
        if self._notified:
            return
        self._notified = True
        # A loop that has ended cannot be told any more, and the engine must not hear of it.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._news.set)


def _result(stream: AnswerStream) -> Generation:
    try:
        return stream.result()
    except RuntimeError as error:
        raise unavailable(str(error)) from error
