"""The server as an ASGI application: its endpoints, and what becomes of errors."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from qwen35_jax.errors import Qwen35Error
from qwen35_jax.inference.engine import Engine
from qwen35_jax.inference.engine import Request as EngineRequest
from qwen35_jax.inference.server.access import Access
from qwen35_jax.inference.server.answer_feed import AnswerFeed
from qwen35_jax.inference.server.api_error import ApiError, as_api_error, field_error, shown
from qwen35_jax.inference.server.chat_choice import ChatChoice
from qwen35_jax.inference.server.chat_request import read_chat_request
from qwen35_jax.inference.server.choice import JSON, Choice
from qwen35_jax.inference.server.completion_choice import CompletionChoice
from qwen35_jax.inference.server.completion_request import read_completion_request
from qwen35_jax.inference.server.json_body import parse_object, read_body
from qwen35_jax.inference.server.metrics import CONTENT_TYPE, Metrics
from qwen35_jax.inference.server.reply import CHAT, COMPLETION, Reply
from qwen35_jax.inference.server.request_record import CLIENT_GONE, Recording, RequestRecord, record_of
from qwen35_jax.inference.server.responses import (
    EventStream,
    error_response,
    json_response,
    unless_disconnected,
)
from qwen35_jax.inference.server.served_model import ServedModel

PAGE = Path(__file__).parent / "page"
_PAGE_POLICY = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}
_FAILED = ApiError("the server failed on this request; its log tells why", status=500, kind="server_error")

Replying = Callable[[Mapping[str, Any], AnswerFeed, RequestRecord], Reply]
"""Reads a request and submits it."""


def create_app(
    engine: Engine,
    served: ServedModel,
    *,
    api_key: str | None,
    local: bool,
    max_body_bytes: int,
    most_choices: int,
) -> Starlette:
    """The application.

    Args:
        engine: that answers; whoever made it closes it.
        served: its model.
        api_key: see `Access`.
        local: see `Access`.
        max_body_bytes: of a request.
        most_choices: that one request may ask for: as many as the engine's slots and its queue hold together.
    """
    metrics = Metrics(engine)
    endpoints = _Endpoints(engine, served, metrics, max_body_bytes, most_choices)
    routes = [
        _route("/v1/chat/completions", endpoints.chat, "POST"),
        _route("/v1/completions", endpoints.completions, "POST"),
        _route("/v1/models", endpoints.models, "GET"),
        _route("/v1/models/{name:path}", endpoints.model, "GET"),
        _route("/health", endpoints.health, "GET"),
        _route("/metrics", endpoints.metrics, "GET"),
        _route("/", _page, "GET"),
        Mount("/page", _recorded("/page", StaticFiles(directory=PAGE))),
    ]
    handlers: dict[Any, Any] = {
        Qwen35Error: endpoints.on_error,
        HTTPException: _on_http_error,
        ClientDisconnect: _on_disconnect,
        Exception: _on_failure,
    }
    middleware = [
        Middleware(Recording, metrics=metrics),
        Middleware(Access, api_key=api_key, local=local),
    ]
    return Starlette(routes=routes, exception_handlers=handlers, middleware=middleware)


class _Endpoints:
    def __init__(
        self, engine: Engine, served: ServedModel, metrics: Metrics, max_body_bytes: int, most_choices: int
    ):
        self._engine = engine
        self._served = served
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._most_choices = most_choices
        self._started = int(time.time())

    async def chat(self, request: Request) -> Response:
        return await self._reply(request, self._begin_chat)

    async def completions(self, request: Request) -> Response:
        return await self._reply(request, self._begin_completion)

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._description()]})

    async def model(self, request: Request) -> Response:
        self._check_name(request.path_params["name"])
        return json_response(self._description())

    async def health(self, request: Request) -> Response:
        """Whether requests are answered."""
        if not self._engine.healthy:
            return json_response({"status": "unavailable"}, 503)
        return json_response({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)

    async def on_error(self, request: Request, error: Qwen35Error) -> Response:
        return error_response(as_api_error(error))

    async def _reply(self, request: Request, begin: Replying) -> Response:
        """Answers a request, whole or as a stream. If its client goes away, the engine stops."""
        record = record_of(request.scope)
        body = await read_body(request, self._max_body_bytes)
        feed = AnswerFeed(self._engine)
        try:
            # In a thread: a long prompt takes a while to be read, and other clients' tokens wait to be sent.
            beginning = asyncio.to_thread(lambda: begin(parse_object(body), feed, record))
            reply = await unless_disconnected(beginning, request.receive)
            if reply.is_stream:
                return EventStream(self._pieces(reply, record), on_end=feed.close)
            whole = await unless_disconnected(reply.whole(), request.receive)
            record.usage = whole["usage"]
            return json_response(whole)
        except BaseException:
            feed.close()
            raise

    async def _pieces(self, reply: Reply, record: RequestRecord) -> AsyncGenerator[JSON | None]:
        """The pieces of a stream. Once it has begun, an error can only be told as one of them."""
        try:
            async for piece in reply.pieces():
                yield piece
            record.usage = reply.usage
            return
        except Qwen35Error as error:
            told = as_api_error(error)
        except Exception:
            traceback.print_exc()
            told = _FAILED
        record.status = told.status
        yield told.body()

    def _begin_chat(self, content: Mapping[str, Any], feed: AnswerFeed, record: RequestRecord) -> Reply:
        self._check_name(content.get("model"))
        asked = read_chat_request(content, self._served, self._engine.memory.context)
        self._submit(feed, asked.requests)
        choices: Sequence[Choice] = [
            ChatChoice(index, asked, self._served.token_texts) for index in range(len(asked.requests))
        ]
        return Reply(CHAT, self._served.name, choices, asked.delivery, feed, record.note_token)

    def _begin_completion(self, content: Mapping[str, Any], feed: AnswerFeed, record: RequestRecord) -> Reply:
        self._check_name(content.get("model"))
        asked = read_completion_request(content, self._served, self._engine.memory.context)
        self._submit(feed, asked.requests)
        choices: Sequence[Choice] = [
            CompletionChoice(index, asked, self._served.token_texts, self._served.tokenizer)
            for index in range(len(asked.requests))
        ]
        return Reply(COMPLETION, self._served.name, choices, asked.delivery, feed, record.note_token)

    def _submit(self, feed: AnswerFeed, requests: Sequence[EngineRequest]) -> None:
        if len(requests) > self._most_choices:
            raise field_error(
                "n", f"makes {len(requests)} answers, and this server takes {self._most_choices} at once"
            )
        feed.submit(requests)

    def _check_name(self, name: Any) -> None:
        """A request that names no model means the only one."""
        if name is None or name == self._served.name:
            return
        if not isinstance(name, str):
            raise field_error("model", f"is {shown(name)}, expected a string", code="invalid_type")
        raise ApiError(
            f"there is no model {shown(name)}: this server has {shown(self._served.name)}",
            status=404,
            param="model",
            code="model_not_found",
        )

    def _description(self) -> JSON:
        return {
            "id": self._served.name,
            "object": "model",
            "created": self._started,
            "owned_by": "qwen35-jax",
            "max_model_len": self._engine.memory.context,
        }


def _route(path: str, endpoint: Callable[[Request], Awaitable[Response]], method: str) -> Route:
    async def recorded(request: Request) -> Response:
        record_of(request.scope).endpoint = path
        return await endpoint(request)

    return Route(path, recorded, methods=[method])


def _recorded(path: str, app: ASGIApp) -> ASGIApp:
    async def recorded(scope: Scope, receive: Receive, send: Send) -> None:
        record_of(scope).endpoint = path
        await app(scope, receive, send)

    return recorded


async def _page(request: Request) -> Response:
    return FileResponse(PAGE / "index.html", headers=_PAGE_POLICY)


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    """Of the router: no such path, or not by this method."""
    path = shown(request.url.path)
    if error.status_code == 404:
        told = ApiError(f"there is nothing at {path}", status=404, code="unknown_url")
    elif error.status_code == 405:
        told = ApiError(f"{path} takes no {request.method}", status=405, code="method_not_allowed")
    else:
        told = ApiError(str(error.detail), status=error.status_code)
    response = error_response(told)
    response.headers.update(error.headers or {})
    return response


async def _on_disconnect(request: Request, error: ClientDisconnect) -> Response:
    record_of(request.scope).status = CLIENT_GONE
    return Response(status_code=CLIENT_GONE)


async def _on_failure(request: Request, error: Exception) -> Response:
    return error_response(_FAILED)
