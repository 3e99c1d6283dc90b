"""The server on a socket: clients that go away free what they held, and the end waits for what runs."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from qwen35_jax.errors import PromptError
from qwen35_jax.inference.server import reply
from qwen35_jax.inference.server.app import create_app
from qwen35_jax.inference.server.running import Server, address_of, bound_socket, is_local
from tests.inference.server.scripted_engine import ScriptedEngine
from tests.inference.server.test_refusals import CHAT, COMPLETIONS, body

SECONDS = 20


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Running:
    """A server in a thread of its own."""

    def __init__(self, engine: ScriptedEngine, served: Any):
        self.engine = engine
        self.listener = bound_socket("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        ready = threading.Event()
        app = create_app(
            engine,  # pyright: ignore[reportArgumentType]
            served,
            api_key=None,
            local=True,
            max_body_bytes=1_000_000,
            most_choices=8,
        )
        self.server = Server(app, engine, ready.set)  # pyright: ignore[reportArgumentType]
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]})
        self.thread.start()
        assert ready.wait(SECONDS)

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)

    def begin(self, path: str = CHAT, **fields: Any) -> http.client.HTTPConnection:
        """A request that has been sent, and of whose response nothing has been read."""
        connection = self.connection()
        connection.request("POST", path, json.dumps(body(path, fields)), {"content-type": "application/json"})
        return connection

    def metric(self, name: str) -> float:
        connection = self.connection()
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.fixture
def running(engine: ScriptedEngine, served: Any) -> Iterator[Running]:
    running = Running(engine, served)
    yield running
    running.server.should_exit = running.server.force_exit = True
    running.thread.join(SECONDS)
    assert not running.thread.is_alive()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_all_that_it_had_begun(running, path, stream):
    running.engine.holds = True
    connection = running.begin(path, stream=stream, n=3)
    wait_for(lambda: running.engine.running == 3)
    if stream:
        assert connection.getresponse().read(10) == b'data: {"id'
    assert running.engine.running == 3
    connection.sock.close() if connection.sock else connection.close()
    connection.close()
    wait_for(lambda: running.engine.running == 0)
    wait_for(lambda: running.metric(f'qwen35_http_requests_total{{endpoint="{path}",status="499"}}') == 1)


def test_a_client_that_goes_away_before_its_request_is_read_leaves_nothing_behind(running, monkeypatch):
    """The engine takes the request on after the client has gone."""
    submit, gone, submitted = running.engine.submit, threading.Event(), threading.Event()

    def late(*args: Any, **options: Any) -> Any:
        assert gone.wait(SECONDS)
        stream = submit(*args, **options)
        submitted.set()
        return stream

    monkeypatch.setattr(running.engine, "submit", late)
    running.engine.holds = True
    running.begin().close()
    wait_for(
        lambda: (
            running.metric('qwen35_http_requests_total{endpoint="/v1/chat/completions",status="499"}') == 1
        )
    )
    gone.set()
    assert submitted.wait(SECONDS)
    wait_for(lambda: running.engine.running == 0)


def test_a_body_that_stops_halfway_and_a_client_that_leaves_are_no_failure(running, capsys):
    with socket.create_connection(("127.0.0.1", running.port)) as connection:
        head = [
            f"POST {CHAT} HTTP/1.1",
            "host: localhost",
            "content-type: application/json",
            "content-length: 99",
        ]
        connection.sendall("\r\n".join([*head, "", '{"mess']).encode())
    wait_for(lambda: running.metric("qwen35_http_requests_total") >= 1)
    assert running.metric('qwen35_http_requests_total{endpoint="/v1/chat/completions",status="499"}') == 1
    assert "Traceback" not in capsys.readouterr().err


def test_a_client_that_ends_its_side_of_the_connection_counts_as_gone(running):
    running.engine.holds = True
    connection = running.begin()
    wait_for(lambda: running.engine.running == 1)
    connection.sock.shutdown(socket.SHUT_WR)
    wait_for(lambda: running.engine.running == 0)
    connection.close()


def test_several_requests_follow_each_other_on_one_connection(running):
    connection = running.connection()
    for _ in range(3):
        connection.request("POST", CHAT, json.dumps(body(CHAT, {})), {"content-type": "application/json"})
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["model"]) == (200, "nano")
    connection.close()


def test_a_stream_in_which_nothing_happens_shows_that_it_lives(running, monkeypatch):
    monkeypatch.setattr(reply, "PATIENCE", 0.05)
    running.engine.holds = True
    connection = running.begin(stream=True)
    response = connection.getresponse()
    while not (line := response.readline()).startswith(b": "):
        assert line
    connection.close()


def test_the_end_waits_for_what_runs_and_takes_nothing_new(running):
    running.engine.holds = True
    connections = [running.begin(stream=stream) for stream in (True, False)]
    wait_for(lambda: running.engine.running == 2)
    running.server.stop()
    wait_for(lambda: not reachable(running.port))
    time.sleep(0.3)
    assert running.thread.is_alive()
    running.engine.end_all()
    responses = [connection.getresponse() for connection in connections]
    assert responses[0].read().endswith(b"data: [DONE]\n\n")
    assert json.loads(responses[1].read())["choices"][0]["finish_reason"] == "stop"
    running.thread.join(SECONDS)
    assert not running.thread.is_alive()


def test_a_second_call_to_stop_cancels_what_runs_and_tells_its_clients(running):
    running.engine.holds = True
    connections = [running.begin(stream=stream) for stream in (True, False)]
    wait_for(lambda: running.engine.running == 2)
    running.server.stop()
    running.server.stop()
    responses = [connection.getresponse() for connection in connections]
    assert [response.status for response in responses] == [200, 503]
    for response in responses:
        assert b"shutting down" in response.read()
    running.thread.join(SECONDS)
    assert not running.thread.is_alive()


def reachable(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def test_an_address_is_what_was_asked_for_and_nobody_else_gets_it():
    with bound_socket("localhost", 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        assert address_of(listener) in (f"http://127.0.0.1:{port}", f"http://[::1]:{port}")
        assert is_local(listener)
        with pytest.raises(PromptError, match=f"port {port}.*in use"):
            bound_socket("localhost", port)
    with bound_socket("0.0.0.0", 0) as listener:
        assert not is_local(listener)


@pytest.mark.parametrize(
    ("host", "port", "complaint"),
    [("127.0.0.1", 70000, "--port is 70000"), ("127.0.0.1", -1, "--port is -1"), ("no.such.host.invalid", 0, "--host"),
     ("a" * 80, 0, "--host"), ("\ud800", 0, "--host"), ("192.0.2.1", 0, "cannot serve at 192.0.2.1")],
)  # fmt: skip
def test_an_address_that_cannot_be_had_is_one_line(host, port, complaint):
    with pytest.raises(PromptError, match=complaint):
        bound_socket(host, port)


CHUNKED = "POST {} HTTP/1.1\r\nhost: {}\r\ncontent-type: {}\r\ntransfer-encoding: chunked\r\n\r\n"
BROKEN = "no number\r\n"


def exchange(running: Running, *pieces: str) -> tuple[int, dict[str, Any]]:
    """The status and the body of the first response to what is sent piece by piece."""
    with socket.create_connection(("127.0.0.1", running.port), timeout=SECONDS) as connection:
        for piece in pieces:
            connection.sendall(piece.encode("latin-1"))
            time.sleep(0.2)  # so that the first one is answered before the next one comes
        response = http.client.HTTPResponse(connection)
        response.begin()
        return response.status, json.loads(response.read())


@pytest.mark.parametrize(
    ("path", "host", "kind", "status"),
    [
        ("/v1/nothing", "localhost", "application/json", 404),
        (CHAT, "example.org", "application/json", 400),
        (CHAT, "localhost", "text/plain", 400),
        (CHAT, "localhost", "application/json", 400),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_body_that_is_broken_is_no_failure_whether_it_is_read_or_not(
    running, capsys, caplog, path, host, kind, status, at_once
):
    head = CHUNKED.format(path, host, kind)
    found, told = exchange(running, *([head + BROKEN] if at_once else [head, BROKEN]))
    assert found == (400 if at_once else status) and told["error"]["type"] == "invalid_request_error"
    wait_for(lambda: running.metric("qwen35_http_requests_total") >= 1)
    assert "Traceback" not in capsys.readouterr().err
    assert not any(record.exc_info for record in caplog.records)


def test_what_is_no_http_is_told_so_as_other_errors_are(running):
    status, told = exchange(running, "\x00\x01\r\n\r\n")
    assert (status, told["error"]["code"]) == (400, "invalid_http")


@pytest.mark.parametrize(
    ("begun", "more"),
    [
        ("", ""),
        ("GET /health HTTP/1.1\r\nx: ", "y"),
        (CHUNKED.format("/v1/nothing", "localhost", "text/plain"), "1\r\nx\r\n"),
    ],
    ids=["nothing", "half a head", "half a body that nobody reads"],
)
def test_a_connection_on_which_no_request_comes_is_ended(running, monkeypatch, begun, more):
    monkeypatch.setattr("qwen35_jax.inference.server.connection.REQUEST_SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", running.port), timeout=SECONDS) as client:
        client.sendall(begun.encode())
        started = time.monotonic()
        client.settimeout(0.1)
        while True:  # a client that sends a little from time to time
            with contextlib.suppress(TimeoutError):
                if not client.recv(9999):
                    break
            with contextlib.suppress(OSError):
                client.sendall(more.encode())
            assert time.monotonic() - started < SECONDS
        assert time.monotonic() - started > 0.4


def test_a_client_that_waits_for_its_answer_is_not_hurried(running, monkeypatch):
    monkeypatch.setattr("qwen35_jax.inference.server.connection.REQUEST_SECONDS", 0.3)
    running.engine.holds = True
    client = running.begin()
    wait_for(lambda: running.engine.running == 1)
    time.sleep(0.6)
    running.engine.end_all()
    assert client.getresponse().status == 200
    client.close()
