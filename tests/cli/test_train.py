"""`qwen35 train`: refusals before anything is written, and what a run shows."""

from __future__ import annotations

import dataclasses
import io
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from qwen35_jax.cli.main import main
from qwen35_jax.cli.training_progress import TrainingBar, TrainingLines
from qwen35_jax.training import trainer
from tests.training.small_run import write_model, write_texts

CONFIG = """
[model]
source = "{folder}/model"
dtype = "float32"

[data]
train = "{folder}/texts.jsonl"
row_length = 26
rows_per_step = 4

[run]
output = "{folder}/run"
steps = 2
"""
STEP = {"step": 1200, "loss": 2.5, "cross_entropy": 2.25, "accuracy": 0.5, "tokens_per_second": 1234.5}
STEP |= {"flops_per_second": 2.5e12, "utilization": 0.25, "memory_bytes": 3 * 2**29}
ANSWERS = {"step": 2, "answers": [{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": "5"}]}
EVALUATION = {"step": 1200, "evaluation_cross_entropy": 1.5, "evaluation_accuracy": 0.25}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("train") / "model")


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    (tmp_path / "model").symlink_to(model)
    write_texts(tmp_path / "texts.jsonl")
    (tmp_path / "run.toml").write_text(CONFIG.format(folder=tmp_path), encoding="utf-8")
    return tmp_path


def refusal(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    """The one line about a run that is refused; nothing is written."""
    before = sorted(folder.rglob("*"))
    assert main(["train", "--config", str(folder / "run.toml"), "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert sorted(folder.rglob("*")) == before
    return captured.err


def test_a_malformed_line_is_named(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    lines = (folder / "texts.jsonl").read_text().splitlines()
    lines[16] = lines[16][:-1]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    assert f"{folder}/texts.jsonl, line 17 is no JSON" in refusal(capsys, folder)


def test_a_wrong_key_is_named(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    with (folder / "run.toml").open("a") as file:
        file.write("stepps = 3\n")
    assert "run.toml: [run] stepps is no key of this section, expected steps" in refusal(capsys, folder)


def test_an_output_that_cannot_be_written_is_refused(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    (folder / "run").write_text("a file")
    assert f"run.output {folder}/run cannot be made, since {folder}/run is a file" in refusal(capsys, folder)


def test_a_model_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "model").unlink()
    assert f"'{folder}/model': no such file or folder" in refusal(capsys, folder)


def test_without_the_train_extra_one_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (
        "qwen35_jax.training.trainer",
        "qwen35_jax.training.batches",
        "qwen35_jax.cli.training_progress",
    ):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "grain", None)
    assert "training needs grain, which is not installed: pip install 'qwen35-jax[train]'" in refusal(
        capsys, folder
    )


@pytest.mark.usefixtures("compiled_quickly")
def test_a_run_ends_with_one_json_object_and_a_model_that_answers(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert main(["train", "--config", str(folder / "run.toml"), "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert (report["steps"], report["began_at"], report["stopped_by"]) == (2, 0, None)
    assert (
        report["cross_entropy"] > 0 and report["evaluation_cross_entropy"] is None and report["seconds"] > 0
    )
    assert "train data: 44 of 44 records" in captured.err and "step 2: " in captured.err
    generate = ["generate", "--model", report["model"], "--prompt", "1 + 1", "--max-new-tokens", "2"]
    assert main([*generate, "--ignore-eos", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 2


@dataclasses.dataclass
class FakeTrainer:
    """A run that is over at once."""

    settings: Any
    watcher: Any
    progress: Any
    outcome = trainer.Outcome(7, 3, {**STEP, "step": 7}, None, None, signal.SIGTERM)

    def run(self) -> trainer.Outcome:
        return self.outcome


def test_a_run_that_was_stopped_says_how_to_go_on_and_ends_as_the_signal_has_it(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "Trainer", FakeTrainer)
    assert main(["train", "--config", str(folder / "run.toml")]) == 143
    assert capsys.readouterr().out == (
        f"stopped by SIGTERM after step 7, which is saved in {folder}/run: the same command goes on from there\n"
    )
    assert main(["train", "--config", str(folder / "run.toml"), "--json"]) == 143
    assert json.loads(capsys.readouterr().out)["stopped_by"] == "SIGTERM"


def test_lines_tell_the_first_and_the_last_step_and_every_evaluation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = TrainingLines()
    lines.started(done=0, steps=1200)
    for line in ({**STEP, "step": 1}, {**STEP, "step": 2}, {**EVALUATION, "step": 2}, ANSWERS, STEP):
        lines.line(line)
    assert capsys.readouterr().err.splitlines() == [
        "qwen35: 1,200 steps; the first one compiles",
        "qwen35: step 1: 2.2500 nats a token, 50.0% right, 1,234 tokens/s, 2.5 TFLOP/s (25%), 1.5 GiB",
        "qwen35: step 2: evaluation 1.5000 nats a token, 25.0% right",
        "qwen35: step 2: '1+1?' is answered '2'; '2+2?' is answered '5'",
        "qwen35: step 1,200: 2.2500 nats a token, 50.0% right, 1,234 tokens/s, 2.5 TFLOP/s (25%), 1.5 GiB",
    ]


def test_a_terminal_shows_a_bar_with_the_numbers() -> None:
    screen = io.StringIO()
    bar = TrainingBar(Console(file=screen, force_terminal=True, width=140))
    bar.note("data: [8] records")
    bar.started(done=1000, steps=2000)
    bar.line(STEP)
    bar.line(EVALUATION)
    bar.stop()
    shown = screen.getvalue()
    for expected in (
        "data: [8] records",
        "1200/2000",
        "2.2500 nats a token",
        "1,234 tokens/s",
        "evaluation 1.5000",
    ):
        assert expected in shown
