"""The server as a process: its address, its signals, its end."""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette

from qwen35_jax.errors import PromptError
from qwen35_jax.inference.engine import Engine
from qwen35_jax.inference.server.connection import Connection

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LAST_WORDS_SECONDS = 5.0
"""For clients to be told that their requests were cancelled, before their connections are cut."""


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket at an address, which from here on is nobody else's. It does not listen yet.

    Args:
        host: a name or an address of this machine.
        port: 0 takes any that is free.

    Raises:
        PromptError: there is no such host, or the port is taken or not for this user.
    """
    if not 0 <= port < 2**16:
        raise PromptError(f"--port is {port}, expected 0 to {2**16 - 1}; 0 takes any that is free")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise PromptError(f"--host is {host!r}, which is no host that is known here: {error}") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise PromptError(
            f"cannot serve at {host} port {port}: {error.strerror}; choose another --port"
        ) from error
    return listener


def address_of(listener: socket.socket) -> str:
    """As a browser takes it."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_local(listener: socket.socket) -> bool:
    """Whether only this machine can reach it."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


class Server(uvicorn.Server):
    """Answers requests until the process gets a signal, and then finishes what runs. A second signal cancels it.

    Args:
        app: from `create_app`.
        engine: of the app; closed only where its requests are cancelled.
        on_ready: called once requests are answered.
    """

    def __init__(self, app: Starlette, engine: Engine, on_ready: Callable[[], None]):
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
        )
        super().__init__(config)
        self._engine = engine
        self._on_ready = on_ready
        self._cancelling: threading.Thread | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    def stop(self) -> None:
        """Takes no more requests and ends once what runs is answered; called again, cancels it. From any thread."""
        if not self.should_exit:
            self.should_exit = True
        elif self._cancelling is None:
            # In a thread: the engine ends its requests after its next step, and their clients are to be told.
            self._cancelling = threading.Thread(target=self._cancel, daemon=True)
            self._cancelling.start()
        else:
            self.force_exit = True

    def _cancel(self) -> None:
        self._engine.close(finish=False)
        time.sleep(LAST_WORDS_SECONDS)
        self.force_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Uvicorn's own raises the signal again at the end, so that the process would never exit with 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, lambda *_: self.stop()) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
