"""An engine's stand-in that draws what a test tells it to, at once and without a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

from qwen35_jax.errors import QueueFullError
from qwen35_jax.inference.engine import AnswerStream, EngineStatistics, Request
from qwen35_jax.inference.engine.prefix_cache import PrefixCacheStatistics
from qwen35_jax.inference.results import FinishReason, Generation, TokenEvent, TokenLogprob
from qwen35_jax.inference.streaming import AnswerText
from qwen35_jax.inference.tokenizer import Tokenizer

CONTEXT = 800
SLOTS = 4


@dataclasses.dataclass
class ScriptedEngine:
    """Answers every request with one text, and a stop id behind it.

    Attributes:
        tokenizer: of the model that there is not.
        answer: what is drawn, up to the request's `max_new_tokens`.
        holds: answers are begun and never ended, until they are cancelled.
        failure: what every answer ends with instead.
        healthy: see `Engine`.
        room: requests that are taken on before the queue is full.
        requests: that were submitted.
        streams: that were given out for them.
    """

    tokenizer: Tokenizer
    answer: str = "A bird is an animal."
    holds: bool = False
    failure: BaseException | None = None
    healthy: bool = True
    room: int = 1000
    requests: list[Request] = dataclasses.field(default_factory=list)
    streams: list[AnswerStream] = dataclasses.field(default_factory=list)
    memory: SimpleNamespace = dataclasses.field(
        default_factory=lambda: SimpleNamespace(context=CONTEXT, slots=SLOTS)
    )

    def submit(self, request: Request, *, notify: Callable[[], None]) -> AnswerStream:
        if self.running >= self.room:
            raise QueueFullError(f"{self.running} requests are waiting already")
        self.requests.append(request)
        number = len(self.streams)
        stream = AnswerStream(number, lambda: self._cancel(number), notify)
        self.streams.append(stream)
        self._draw(number)
        return stream

    @property
    def running(self) -> int:
        return sum(not stream.finished for stream in self.streams)

    def end_all(self) -> None:
        """Ends the answers that were held, as if their stop ids came now."""
        for request, stream in zip(self.requests, self.streams, strict=True):
            if not stream.finished:
                stream.finish(self._generation(request, self._drawn, "stop"))

    def close(self, *, finish: bool) -> None:
        assert not finish
        for stream in self.streams:
            stream.cancel()

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            slots=SLOTS,
            occupied=self.running,
            queued=0,
            submitted=len(self.streams),
            finished=len(self.streams) - self.running,
            cancelled=0,
            failed=0,
            prompt_tokens=0,
            cached_tokens=0,
            generated_tokens=0,
            compiled_programs=5,
            prefix_cache=PrefixCacheStatistics(budget=9, held=7, snapshots=2, hits=3, misses=4, evicted=6),
        )

    def _draw(self, number: int) -> None:
        request, stream = self.requests[number], self.streams[number]
        settings = request.settings
        text = AnswerText(self.tokenizer, settings.stop, request.stop_ids)
        drawn: list[int] = []
        reason: FinishReason = "length"
        for token in [*self.tokenizer.encode(self.answer), *request.stop_ids[:1]][: settings.max_new_tokens]:
            drawn.append(token)
            stream.put(
                TokenEvent(number, token, text.push(token), None, _logprob(token, settings.top_logprobs))
            )
            if text.stopped or token in request.stop_ids:
                reason = "stop"
                break
        self._drawn = drawn
        if self.holds:
            return
        stream.put(TokenEvent(number, None, text.flush(), reason))
        stream.finish(self.failure or self._generation(request, drawn, reason))

    def _cancel(self, number: int) -> None:
        stream = self.streams[number]
        if not stream.finished:
            stream.put(TokenEvent(number, None, "", "cancelled"))
            stream.finish(self._generation(self.requests[number], self._drawn, "cancelled"))

    def _generation(self, request: Request, drawn: list[int], reason: FinishReason) -> Generation:
        return Generation(request.prompt, tuple(drawn), "", reason, seed=0, passes=0, cached_tokens=3)


def _logprob(token: int, top: int | None) -> TokenLogprob | None:
    if top is None:
        return None
    return TokenLogprob(token, -0.5, ((token, -0.5), (5, -1.25), (6, -2.5))[:top])
