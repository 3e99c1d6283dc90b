"""A client's connection, beyond what uvicorn makes of it.

A client that shuts down its sending side counts as gone, also where it would still have read the answer (`nc -N` is one
such). On a socket the two look alike until something is written, and an answer that is no stream would be drawn to its
end for nobody.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from qwen35_jax.inference.server.api_error import ApiError
from qwen35_jax.inference.server.responses import to_json

REQUEST_SECONDS = 60.0
"""That a connection may take to begin a request, or to send what is left of one that is answered already."""


class Connection(H11Protocol):
    """Ends connections on which no request comes, and tells of malformed ones as of any other error.

    Uvicorn's own patience is for the time between two requests, and for clients that send nothing at all.
    """

    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._patience is not None:
            self._patience.cancel()

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP, unless something has been answered already, as before a body that breaks off."""
        begun = self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = (
                True  # so that the application, which may not have begun, answers nothing more
            )
            self.cycle.message_event.set()
        if not begun:
            body = to_json(ApiError("this is no request of HTTP/1.1", code="invalid_http").body())
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch(self) -> None:
        """Counts the time while the next move is the client's."""
        waits = self.cycle is None or self.cycle.response_complete
        if waits and self._patience is None:
            self._patience = self.loop.call_later(REQUEST_SECONDS, self.transport.close)
        elif not waits and self._patience is not None:
            self._patience.cancel()
            self._patience = None
