"""A client's connection, beyond what uvicorn makes of it.

A client that shuts down its sending side counts as gone, also where it would still have read the answer (`nc -N` is one
such). On a socket the two look alike until something is written, and an answer that is no stream would be drawn to its
end for nobody.
"""

from __future__ import annotations

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from qwen35_jax.inference.server.api_error import ApiError
from qwen35_jax.inference.server.responses import to_json


class Connection(H11Protocol):
    """Tells of malformed requests as of any other error."""

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
