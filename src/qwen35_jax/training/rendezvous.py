"""How the processes of a run find each other before JAX starts between them: each tells process 0 that it is there.

JAX itself ends a process that finds no other, or one too many, by a crash. So they meet here first, over the address
that JAX will use, and who is missing or not expected is told in one line.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from typing import NamedTuple

from qwen35_jax.errors import ConfigError

_MOST_BYTES = 4096  # of a message
_BETWEEN_TRIES = 0.2  # seconds


class ProcessPlace(NamedTuple):
    """Which of the processes of a run this one is.

    Attributes:
        coordinator: address of process 0, HOST:PORT. The port is free there.
        count: of the processes.
        index: of this one, from 0.
    """

    coordinator: str
    count: int
    index: int


def check_place(place: ProcessPlace) -> None:
    """Raises `ConfigError` for a place that cannot be: an address of another form, or an index out of range."""
    host, _, port = place.coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"coordinator is {place.coordinator!r}, expected HOST:PORT")
    if not 0 <= place.index < place.count:
        raise ConfigError(
            f"process is {place.index}, expected 0 to {place.count - 1}, of {place.count} processes"
        )


def meet(place: ProcessPlace, *, seconds: float) -> None:
    """Returns when all processes of a run are there; the port is free again then.

    Args:
        place: of this process.
        seconds: to wait at most.

    Raises:
        ConfigError: some did not come, or one that was not expected did; all that are there are told.
    """
    until = time.monotonic() + seconds
    check_place(place)
    if place.index == 0:
        _receive_others(place, until, seconds)
    else:
        _report(place, until, seconds)


def _receive_others(place: ProcessPlace, until: float, seconds: float) -> None:
    here: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as open_sockets:
        server = open_sockets.enter_context(_listening(place))
        complaint = None
        while complaint is None and len(here) < place.count - 1:
            server.settimeout(max(0.01, until - time.monotonic()))
            try:
                connection = open_sockets.enter_context(server.accept()[0])
            except TimeoutError:
                missing = sorted(set(range(1, place.count)) - here.keys())
                complaint = (
                    f"process {_listed(missing)} of {place.count} did not start within {seconds:g} seconds"
                )
                break
            told = _message(connection)
            if told is None:
                continue  # no process of ours: whoever looks for open ports
            index, count = told
            if count != place.count:
                complaint = f"process {index} was told of {count} processes, and process 0 of {place.count}"
            elif index in here or not 0 < index < count:
                complaint = f"process {index} of {count} was started twice"
            here[-1 if index in here else index] = connection
        for connection in here.values():
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(complaint).encode() + b"\n")
    if complaint is not None:
        raise ConfigError(complaint)


def _listening(place: ProcessPlace) -> socket.socket:
    _, port = _address(place)
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=place.count
            )
        return socket.create_server(("", port), backlog=place.count)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error  # Python adds to the system's words
        raise ConfigError(f"coordinator is {place.coordinator}: its port is not free: {reason}") from error


def _message(connection: socket.socket) -> tuple[int, int] | None:
    """What another process tells: its index, and how many it was told of. None for what is no such message."""
    connection.settimeout(5)
    try:
        told = json.loads(_line(connection))
        return int(told["process"]), int(told["processes"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _report(place: ProcessPlace, until: float, seconds: float) -> None:
    message = json.dumps({"process": place.index, "processes": place.count}).encode() + b"\n"
    address, reason = _address(place), "no answer"
    while (left := until - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=left) as connection:
                connection.settimeout(left + 5)  # process 0 is the first to give up, and says why
                connection.sendall(message)
                complaint = json.loads(_line(connection))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or reason
            time.sleep(_BETWEEN_TRIES)
            continue
        if complaint is not None:
            raise ConfigError(complaint)
        return
    raise ConfigError(
        f"coordinator {place.coordinator} did not answer within {seconds:g} seconds ({reason}): is process 0 running "
        "there, and may it be reached from here?"
    )


def _address(place: ProcessPlace) -> tuple[str, int]:
    host, _, port = place.coordinator.rpartition(":")
    return host.strip("[]"), int(port)


def _line(connection: socket.socket) -> bytes:
    received = b""
    while not received.endswith(b"\n") and len(received) < _MOST_BYTES:
        piece = connection.recv(_MOST_BYTES)
        if not piece:
            break
        received += piece
    return received


def _listed(numbers: list[int]) -> str:
    few = ", ".join(map(str, numbers[:5]))
    return few if len(numbers) <= 5 else f"{few} and {len(numbers) - 5} more"
