"""`qwen35 serve`: what it refuses before anything slow, what it says, and how it ends."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
import time
import urllib.request

import pytest

from qwen35_jax import checkpoint
from qwen35_jax.cli import serve
from qwen35_jax.cli.main import main
from qwen35_jax.cli.serve import KEY_VARIABLE
from qwen35_jax.inference.buckets import PREFILL_BUCKETS
from tests.inference.server.served_process import ServedProcess


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("the weights are read")

    monkeypatch.setattr(checkpoint, "load", load)


def complaint(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["serve", *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", "70000"], "--port is 70000"),
        (["--host", "no.such.host.invalid"], "--host is 'no.such.host.invalid'"),
        (["--slots", "0"], "--slots is 0"),
        (["--queue", "0"], "--queue is 0"),
        (["--context", "1"], "--context is 1, expected 2 to 2048"),
        (["--context", "4096"], "--context is 4096, expected 2 to 2048"),
        (["--prefix-cache-bytes", "-1"], "--prefix-cache-bytes is -1"),
        (["--prefill-tokens", "100"], "--prefill-tokens is 100, expected one of 16"),
        (["--max-body-bytes", "0"], "--max-body-bytes is 0"),
        (["--speculate", "9"], "9"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--api-key-file", "no-such-file"], "--api-key-file no-such-file cannot be read"),
    ],
)
@pytest.mark.usefixtures("no_weights")
def test_what_cannot_be_is_one_line_before_the_weights_are_read(capsys, options, words):
    assert words in complaint(capsys, "--port", "0", *options)


def test_the_help_lists_the_lengths_of_a_piece(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    listed = re.search(r"others wait: ([\d, or]+)\(default 256\)", " ".join(capsys.readouterr().out.split()))
    assert listed is not None
    assert tuple(map(int, re.findall(r"\d+", listed[1]))) == PREFILL_BUCKETS


@pytest.mark.usefixtures("no_weights")
def test_a_port_that_is_taken_is_one_line_before_the_weights_are_read(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"cannot serve at 127.0.0.1 port {port}: " in complaint(capsys, "--port", str(port))


@pytest.mark.parametrize("key", ["", " \n", "two words", "schlüssel", "a\nb"])
@pytest.mark.usefixtures("no_weights")
def test_a_key_that_is_none_is_refused_instead_of_serving_everyone(capsys, monkeypatch, tmp_path, key):
    monkeypatch.setenv(KEY_VARIABLE, key)
    assert f"{KEY_VARIABLE} holds no key" in complaint(capsys)
    monkeypatch.delenv(KEY_VARIABLE)
    (tmp_path / "key").write_text(key, encoding="utf-8")
    assert "holds no key" in complaint(capsys, "--api-key-file", str(tmp_path / "key"))


def test_slots_that_do_not_fit_are_one_line_and_nothing_is_compiled(capsys):
    assert "1000000000 slots" in complaint(capsys, "--port", "0", "--slots", "1000000000")


@pytest.mark.parametrize(("seconds", "lines"), [(0.0, 0), (0.3, 2)])
def test_work_that_takes_a_while_is_told_with_its_time(capsys, monkeypatch, seconds, lines):
    monkeypatch.setattr(serve, "PATIENCE", 0.1)
    with serve._telling("compiling"):
        time.sleep(seconds)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == lines
    assert not told or (
        told[0] == "qwen35: compiling" and re.fullmatch(r"qwen35: compiled in 0\.\d s", told[1])
    )


@pytest.mark.parametrize("package", ["starlette", "uvicorn", "prometheus_client"])
@pytest.mark.usefixtures("no_weights")
def test_without_the_extra_it_says_what_to_install(capsys, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    for name in [
        name for name in sys.modules if name.startswith(("qwen35_jax.inference.server.", f"{package}."))
    ]:
        monkeypatch.delitem(sys.modules, name)
    assert "pip install 'qwen35-jax[serve]'" in complaint(capsys, "--port", "0")


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables by which the servers of this file share what they compile."""
    folder = str(tmp_path_factory.mktemp("programs"))
    return {"JAX_ENABLE_COMPILATION_CACHE": "true", "XDG_CACHE_HOME": folder}


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_lets_it_finish_what_runs_and_a_second_one_does_not(tmp_path, compiled_once, signals):
    (tmp_path / "key").write_text("sk-x\n")
    options = ["--slots", "1", "--context", "2048", "--prefill-tokens", "16", "--model-name", "house/model"]
    options += ["--api-key-file", str(tmp_path / "key")]
    with ServedProcess(*options, environment=compiled_once) as server:
        assert re.fullmatch(
            r"qwen35: house/model is served at http://127\.0\.0\.1:\d+ \(.* 1 slots of 2048 tokens take .*",
            server.lines[-1],
        )
        assert any(line.startswith("qwen35: compiling the programs of house/model") for line in server.lines)
        assert re.fullmatch(r"qwen35: compiled in \d+\.\d s", server.lines[-2])
        asked = {
            "model": "house/model",
            "prompt": "The",
            "max_tokens": 2000,
            "ignore_eos": True,
            "stream": True,
        }
        request = urllib.request.Request(
            f"{server.address}/v1/completions",
            json.dumps(asked).encode(),
            {"content-type": "application/json", "authorization": "Bearer sk-x"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            response.readline()
            server.process.send_signal(signal.SIGTERM)
            if signals == 2:
                time.sleep(0.05)  # two that come at once may be seen as one
                server.process.send_signal(signal.SIGINT)
            rest = response.read()
        assert (b'"finish_reason":"length"' in rest) == (signals == 1)
        assert (b"shutting down" in rest) == (signals == 2)
        assert rest.endswith(b"data: [DONE]\n\n")
        assert server.wait() == 0
        status = 200 if signals == 1 else 503
        assert server.lines[-1].startswith(f"POST /v1/completions {status} ")
