"""The chat page, with a server behind it that says what a test wants and tells what it was asked."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from qwen35_jax.inference.server.app import PAGE

POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'"
DONE = "data: [DONE]\n\n"
USAGE = {
    "prompt_tokens": 30,
    "completion_tokens": 12,
    "total_tokens": 42,
    "prompt_tokens_details": {"cached_tokens": 16},
    "completion_tokens_details": {"reasoning_tokens": 5},
}


def thought(text: str) -> dict[str, Any]:
    return {"reasoning_content": text}


def content(text: str) -> dict[str, Any]:
    return {"content": text}


@dataclasses.dataclass(frozen=True)
class Answer:
    """What is said to one request.

    Attributes:
        deltas: of the pieces, one after the other.
        hold_after: how many of them come before the server waits for `FakeServer.release`.
        finish_reason: of the last piece.
        error: in place of an end.
        done: whether the stream ends as it should.
        chunk: bytes that are sent at a time; 0 sends each event whole.
        line_end: of the stream's lines.
        refusal: a response in place of a stream.
    """

    deltas: Sequence[dict[str, Any]] = ()
    hold_after: int | None = None
    finish_reason: str = "stop"
    error: str | None = None
    done: bool = True
    chunk: int = 0
    line_end: str = "\n"
    refusal: Response | None = None

    def events(self) -> list[str]:
        pieces = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in self.deltas]
        if self.error is not None:
            ends: list[Any] = [{"error": {"message": self.error}}]
        else:
            ends = [
                {"choices": [{"index": 0, "delta": {}, "finish_reason": self.finish_reason}]},
                {"choices": [], "usage": USAGE},
            ]
        opening = {
            "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
        }
        written = [
            f"data: {json.dumps(piece, ensure_ascii=False)}\n\n" for piece in [opening, *pieces, *ends]
        ]
        written.insert(1, ": still at work\n\n")
        return [event.replace("\n", self.line_end) for event in [*written, *([DONE] if self.done else [])]]


class FakeServer:
    """The server.

    Attributes:
        url: of the page.
        answers: to the next requests; the last one is given again and again.
        key: that requests have to bring, where there is one.
        requests: bodies of the requests for answers so far.
        release: lets an answer that is held go on.
        left: set when a client goes away before its answer has ended.
    """

    def __init__(self):
        self.url = ""
        self.key: str | None = None
        self.answers: list[Answer] = [Answer()]
        self.requests: list[dict[str, Any]] = []
        self.release = threading.Event()
        self.left = threading.Event()

    def reset(self) -> None:
        """As it was in the beginning, for the next test."""
        self.key = None
        self.requests.clear()
        self.release.clear()
        self.left.clear()

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/", self._page),
                Mount("/page", StaticFiles(directory=PAGE)),
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    async def _page(self, request: Request) -> Response:
        return FileResponse(PAGE / "index.html", headers={"content-security-policy": POLICY})

    async def _models(self, request: Request) -> Response:
        model = {"id": "fake-0.8b", "object": "model", "max_model_len": 4096}
        return self._refusal(request) or JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        self.requests.append(await request.json())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return answer.refusal or StreamingResponse(self._stream(answer), media_type="text/event-stream")

    def _refusal(self, request: Request) -> Response | None:
        if self.key is None or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return JSONResponse({"error": {"message": "the API key is wrong"}}, 401)

    async def _stream(self, answer: Answer) -> AsyncIterator[bytes]:
        try:
            for index, event in enumerate(answer.events()):
                if answer.hold_after is not None and index == answer.hold_after + 2:
                    while not self.release.is_set():
                        await asyncio.sleep(0.01)
                raw = event.encode()
                for start in range(0, len(raw), answer.chunk or len(raw)):
                    yield raw[start : start + (answer.chunk or len(raw))]
                    await asyncio.sleep(0 if answer.chunk else 0.005)
        except asyncio.CancelledError:
            self.left.set()
            raise


@contextmanager
def running(fake: FakeServer) -> Iterator[FakeServer]:
    """Runs the server in a thread, at a port that is free."""
    server = uvicorn.Server(
        uvicorn.Config(fake.app(), port=0, log_level="warning", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("the server has not started")
        threading.Event().wait(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    fake.url = f"http://127.0.0.1:{port}/"
    try:
        yield fake
    finally:
        server.should_exit = True
        thread.join(timeout=10)


def refusal(status: int, message: str) -> Answer:
    return Answer(refusal=JSONResponse({"error": {"message": message}}, status))


def nonsense(status: int) -> Answer:
    return Answer(refusal=PlainTextResponse("<h1>Bad gateway</h1>", status))
