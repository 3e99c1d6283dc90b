"""Processes that meet all set out together; what keeps them from it is told to every one that is there."""

from __future__ import annotations

import concurrent.futures
import socket
import time

import pytest

from qwen35_jax.errors import ConfigError
from qwen35_jax.training.rendezvous import ProcessPlace, meet


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def outcomes(*places: tuple[int, int], seconds: float, address: str | None = None) -> list[str]:
    """What becomes of processes, given as (index, count): the complaint of each, or nothing."""
    where = address or free_address()

    def one(place: tuple[int, int]) -> str:
        index, count = place
        try:
            meet(ProcessPlace(where, count, index), seconds=seconds)
        except ConfigError as error:
            return str(error)
        return ""

    with concurrent.futures.ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(one, places))


def test_all_go_on_once_the_last_is_there_and_the_port_is_free_again() -> None:
    address = free_address()
    for _ in range(2):
        assert outcomes((2, 3), (1, 3), (0, 3), seconds=20, address=address) == ["", "", ""]


def test_who_is_missing_is_told_to_those_who_came_in_time() -> None:
    begun = time.monotonic()
    found = outcomes((0, 4), (2, 4), seconds=1)
    assert found == ["process 1, 3 of 4 did not start within 1 seconds"] * 2
    assert time.monotonic() - begun < 5


def test_a_coordinator_that_does_not_answer_is_named() -> None:
    (complaint,) = outcomes((1, 2), seconds=0.5, address="127.0.0.1:9")
    assert complaint.startswith(
        "coordinator 127.0.0.1:9 did not answer within 0.5 seconds (Connection refused)"
    )


def test_numbers_of_processes_that_do_not_agree_are_told_to_all() -> None:
    found = outcomes((0, 2), (1, 3), seconds=20)
    assert found == ["process 1 was told of 3 processes, and process 0 of 2"] * 2


def test_a_process_that_was_started_twice_is_told_to_all() -> None:
    assert outcomes((0, 3), (1, 3), (1, 3), seconds=20) == ["process 1 of 3 was started twice"] * 3


def test_whoever_only_looks_for_open_ports_is_no_process() -> None:
    address = free_address()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(outcomes, (0, 2), seconds=20, address=address)
        for message in (b"GET / HTTP/1.0\n", b"[1, 2]\n", b'{"process": "x", "processes": 2}\n'):
            connection = connect(address)
            connection.sendall(message)
            connection.close()
        assert outcomes((1, 2), seconds=20, address=address) == [""]
        assert first.result() == [""]


def connect(address: str) -> socket.socket:
    host, port = address.split(":")
    for _ in range(100):
        try:
            return socket.create_connection((host, int(port)))
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"nobody listens on {address}")


@pytest.mark.parametrize(
    ("address", "index", "complaint"),
    [
        ("nowhere", 0, "coordinator is 'nowhere', expected HOST:PORT"),
        ("host:70000", 1, "coordinator is 'host:70000', expected HOST:PORT"),
        ("host:5", 2, "process is 2, expected 0 to 1, of 2 processes"),
    ],
)
def test_places_that_cannot_be_are_refused(address: str, index: int, complaint: str) -> None:
    assert outcomes((index, 2), seconds=1, address=address) == [complaint]


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (complaint,) = outcomes((0, 2), seconds=1, address=address)
    assert complaint == f"coordinator is {address}: its port is not free: Address already in use"
