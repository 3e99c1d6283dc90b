"""Responses in JSON and as events, and how a client that goes away is noticed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from qwen35_jax.inference.server.api_error import ApiError
from qwen35_jax.inference.server.request_record import CLIENT_GONE, record_of

Result = TypeVar("Result")
EVENTS_END = b"data: [DONE]\n\n"
_SIGN_OF_LIFE = b": still at work\n\n"


def to_json(content: Any) -> bytes:
    """JSON in UTF-8. Half a character, as a model may write one into the arguments of a call, is escaped."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", errors="backslashreplace")


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(content), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers)


class EventStream(Response):
    """Server-sent events: a JSON object each, as they come.

    Args:
        pieces: the objects; None for a sign of life. Closed when the client goes away.
        on_end: called at the end, whichever way it comes.
    """

    media_type = "text/event-stream"

    def __init__(self, pieces: AsyncGenerator[Any], on_end: Callable[[], None]):
        # Proxies that gather a response before they pass it on are asked not to.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._pieces = pieces
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(self._send_all(send), receive)
        except ClientDisconnect:
            record_of(scope).status = CLIENT_GONE
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._pieces) as pieces:
            async for piece in pieces:
                event = _SIGN_OF_LIFE if piece is None else b"data: " + to_json(piece) + b"\n\n"
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": EVENTS_END, "more_body": False})


async def unless_disconnected(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """Does some work for a client, as long as it is there.

    Args:
        work: cancelled when the client goes away.
        receive: of the request, whose body has been read.

    Raises:
        ClientDisconnect: the client went away first.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnection(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
