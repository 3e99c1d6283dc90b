"""`qwen35 eval` on a tiny checkpoint with random weights."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path

import pytest

from qwen35_jax.checkpoint import export_hf, load
from qwen35_jax.cli.main import main
from qwen35_jax.inference.perplexity import perplexity
from tests.inference.tiny_model import CONTEXT, ascii_tokenizer, tiny_model

TEXT = "The capital of France is Paris, and that of Portugal is Lisbon.\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model()
    path = tmp_path_factory.mktemp("checkpoints") / "tiny"
    export_hf(model.parameters, model.config, path)
    ascii_tokenizer().backend.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT.strip(), encoding="utf-8")
    return path


def run_json(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> dict:
    assert main(["eval", "--model", str(folder), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    try:
        status = main(["eval", *options])
    except SystemExit as exit:
        status = exit.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_json_reports_the_perplexity_of_the_library(
    capsys: pytest.CaptureFixture[str], folder: Path, file: Path
) -> None:
    report = run_json(capsys, folder, "--text", str(file), "--window", "20", "--stride", "5", "--batch", "3")
    tokens = ascii_tokenizer().encode(TEXT.strip())
    expected = perplexity(load(folder), tokens, window=20, stride=5, batch=3)
    assert report["tokens"] == len(tokens) == 63
    assert report["scored_tokens"] == report["scored_bytes"] == 62
    assert report["window"] == 20 and report["stride"] == 5
    assert report["nats_per_token"] == pytest.approx(expected.nats / 62)
    assert report["perplexity"] == pytest.approx(math.exp(report["nats_per_token"]))
    assert report["bits_per_byte"] == pytest.approx(report["nats_per_token"] / math.log(2))
    assert report["tokens_per_second"] > 0 and report["compile_seconds"] >= 0


def test_people_get_a_table_and_the_same_figures(
    capsys: pytest.CaptureFixture[str], folder: Path, file: Path
) -> None:
    report = run_json(capsys, folder, "--text", str(file))
    assert report["window"] == CONTEXT and report["stride"] == CONTEXT // 2
    assert main(["eval", "--model", str(folder), "--text", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "63 tokens; windows of 700, one every 350" in shown
    assert f"perplexity      {report['perplexity']:.4f}" in shown
    assert f"bits per byte   {report['bits_per_byte']:.4f}" in shown
    assert "62 tokens scored in" in shown and "tokens/s" in shown


def test_a_dash_reads_standard_input(
    capsys: pytest.CaptureFixture[str], folder: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    piped = run_json(capsys, folder, "--text", "-")
    assert piped["text"] == "standard input"
    assert piped["nats_per_token"] == run_json(capsys, folder, "--text", str(file))["nats_per_token"]


def test_bytes_are_counted_from_where_the_second_token_begins(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The built-in model's tokenizer cuts characters into bytes where it knows no better."""
    file = tmp_path / "text.txt"
    file.write_text("\N{SNOWMAN}\N{SNOWMAN} caf\N{LATIN SMALL LETTER E WITH ACUTE}", encoding="utf-8")
    report = run_json(capsys, Path("nano"), "--text", str(file), "--window", "64")
    assert 6 <= report["scored_bytes"] <= 12
    assert report["bits_per_byte"] == pytest.approx(
        report["nats_per_token"] * report["scored_tokens"] / math.log(2) / report["scored_bytes"]
    )


def test_what_cannot_be_measured_is_one_line(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(content: bytes) -> str:
        path = tmp_path / "bad.txt"
        path.write_bytes(content)
        return str(path)

    monkeypatch.setattr("qwen35_jax.checkpoint.load", None)  # no weights are read for any of these
    here = ("--model", str(folder), "--text")
    good = str(tmp_path / "good.txt")
    Path(good).write_text("long enough a text")
    assert "--batch is 0" in refusal(capsys, *here, good, "--batch", "0")
    assert f"window is {CONTEXT + 1}, expected 1 to {CONTEXT}" in refusal(
        capsys, *here, good, "--window", str(CONTEXT + 1)
    )
    assert "window is 0" in refusal(capsys, *here, good, "--window", "0")
    assert "stride is 9, expected 1 to 8" in refusal(capsys, *here, good, "--window", "8", "--stride", "9")
    assert "invalid int value" in refusal(capsys, *here, good, "--stride", "x")
    assert "bad.txt is empty" in refusal(capsys, *here, written(b""))
    assert "1 token, expected at least 2" in refusal(capsys, *here, written(b"a"))
    assert "not UTF-8 text (byte 2 is 0xff)" in refusal(capsys, *here, written(b"ab\xff"))
    assert "No such file" in refusal(capsys, *here, str(tmp_path / "none.txt"))
    assert "Is a directory" in refusal(capsys, *here, str(tmp_path))
    assert "--text" in refusal(capsys)
    assert "no_such_model" in refusal(capsys, "--model", "./no_such_model", "--text", good)
