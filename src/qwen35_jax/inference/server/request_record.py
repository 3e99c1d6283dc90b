"""What is kept of each request: a line on standard error, and numbers for Prometheus."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwen35_jax.inference.server.choice import JSON
from qwen35_jax.inference.server.metrics import Metrics

CLIENT_GONE = 499
"""The status that is noted where nobody was there to get one, after a custom of proxies."""

_KEY = "qwen35_jax.record"
_UNTOLD = ("/health", "/metrics", "/", "/page")
"""Asked for so often, or so little of an event, that no line tells of it."""


@dataclasses.dataclass
class RequestRecord:
    """A request as it goes.

    Attributes:
        endpoint: the path of the route that it was for.
        started: when it came, in seconds of a steady clock.
        first_token: when its first token came.
        status: of the response.
        usage: numbers of tokens.
    """

    endpoint: str = "other"
    started: float = dataclasses.field(default_factory=time.perf_counter)
    first_token: float | None = None
    status: int = 500
    usage: JSON | None = None

    def note_token(self) -> None:
        """To be called with every token."""
        if self.first_token is None:
            self.first_token = time.perf_counter()

    @property
    def first_token_seconds(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.started


def record_of(scope: Scope) -> RequestRecord:
    """The record of a request."""
    return scope[_KEY]


class Recording:
    """Keeps a record of every request.

    Args:
        app: that answers them.
        metrics: that counts them.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope[_KEY] = RequestRecord()

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start" and record.status != CLIENT_GONE:
                record.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            self._keep(scope, record)

    def _keep(self, scope: Scope, record: RequestRecord) -> None:
        seconds = time.perf_counter() - record.started
        self._metrics.record(record.endpoint, record.status, seconds, record.first_token_seconds)
        if record.endpoint in _UNTOLD and record.status < 400:
            return
        # Escaped, so that no line ends where a client wants it to.
        path = ascii((scope.get("raw_path") or scope["path"].encode()).decode("latin-1"))[1:-1][:200]
        with contextlib.suppress(OSError):  # nobody reads standard error any more
            print(
                f"{scope['method']} {path} {record.status} {_figures(record, seconds)}",
                file=sys.stderr,
                flush=True,
            )


def _figures(record: RequestRecord, seconds: float) -> str:
    parts = [f"{seconds:.2f} s"]
    first = record.first_token_seconds
    if record.usage is not None and first is not None:
        prompt, answer = record.usage["prompt_tokens"], record.usage["completion_tokens"]
        cached = record.usage["prompt_tokens_details"]["cached_tokens"]
        rate = (answer - 1) / (seconds - first) if answer > 1 and seconds > first else 0.0
        parts.append(f"{prompt} tokens{f' ({cached} cached)' if cached else ''}, then {answer}")
        parts.append(f"first after {first:.2f} s, {rate:.1f} tokens/s")
    return ", ".join(parts)
