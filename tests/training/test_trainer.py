"""A run goes on as if nothing had happened, whatever ended it and on however many devices."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.checkpoint import load
from qwen35_jax.checkpoint.source import convert
from qwen35_jax.errors import CheckpointError, ConfigError
from qwen35_jax.inference import GenerationSettings, generate
from qwen35_jax.training import preparation
from qwen35_jax.training.guard import TrainingError
from qwen35_jax.training.preparation import prepare
from qwen35_jax.training.trainer import Outcome, Trainer
from qwen35_jax.training.watcher import Watcher
from tests.inference.tiny_model import tiny_model
from tests.training.small_run import STEPS, compiled_quickly, small_run, write_model, write_texts

ROOT = Path(__file__).parents[2]

PROGRAM = textwrap.dedent(
    """
    import json, os, shutil, signal, sys
    from pathlib import Path
    import jax, numpy as np
    from qwen35_jax.training import trainer
    from qwen35_jax.training.preparation import prepare
    from qwen35_jax.training.watcher import Watcher
    from tests.training.small_run import small_run

    folder, kind = Path(sys.argv[1]), sys.argv[2]

    class Killed(Watcher):
        def line(self, line):
            # The checkpoint of step 4 is being written, or has just been.
            if line["step"] == 5:
                os.kill(os.getpid(), signal.SIGKILL)

    if kind == "killed":
        trainer.Trainer(small_run(folder, run={"output": str(folder / "killed")}), watcher=Killed()).run()

    def settings(output, mesh):
        return small_run(folder, run={"output": str(folder / output), "keep": 9, "mesh": mesh})

    def by_path(state):
        return {
            jax.tree_util.keystr(path): np.asarray(jax.random.key_data(x) if "key" in str(x.dtype) else x)
            for path, x in jax.tree_util.tree_leaves_with_path(state)
        }

    def misplaced(state, wanted):
        pairs = zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True)
        return [str(x.shape) for x, cut in pairs if not x.sharding.is_equivalent_to(cut.sharding, x.ndim)]

    in_memory, moved = {}, []
    save = trainer.Checkpoints.save

    def remembered(self, state, *rest):
        moved.extend(misplaced(state, eight))
        in_memory[int(state.step)] = jax.tree.map(np.array, by_path(state))
        save(self, state, *rest)

    trainer.Checkpoints.save = remembered
    eight = prepare(settings("eight", {"data": 2, "fsdp": 4}), Watcher()).abstract_state
    trainer.Trainer(settings("eight", {"data": 2, "fsdp": 4})).run()
    assert in_memory.keys() == {2, 4, 6}
    # A state that a step returned elsewhere than it was would need another program for the next one.
    assert not moved, moved
    trainer.Checkpoints.save = save
    shutil.copytree(folder / "eight", folder / "four")
    for later in ("checkpoints/4", "checkpoints/6", "model"):
        shutil.rmtree(folder / "four" / later)
    shutil.copytree(folder / "four", folder / "one")
    found = {}
    for name, mesh in {"four": {"data": 2, "fsdp": 2}, "one": {"data": 1}}.items():
        wanted = prepare(settings(name, mesh), Watcher()).abstract_state
        with trainer.Checkpoints(folder / name / "checkpoints", keep=9) as checkpoints:
            restored = checkpoints.restore(2, wanted)
        arrays = by_path(restored)
        found[name] = {
            "same names": arrays.keys() == in_memory[2].keys(),
            "different": [path for path, array in arrays.items() if not np.array_equal(array, in_memory[2][path])],
            "zero": [path for path, array in arrays.items() if not array.any()],
            "misplaced": misplaced(restored, wanted),
            "cut": sum(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(restored.optimizer)),
        }
    trainer.Trainer(settings("four", {"data": 2, "fsdp": 2})).run()
    print(json.dumps(found))
    """
)


def subprocess_run(folder: Path, kind: str, *, devices: int) -> subprocess.CompletedProcess:
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    arguments = [sys.executable, "-c", PROGRAM, str(folder), kind]
    return subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT, env=environment)


class Lines(Watcher):
    """Keeps what it is told, and asks the run to end after a step."""

    def __init__(self, *, end_after: int | None = None):
        self.lines: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self._end_after = end_after

    def line(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        if line["step"] == self._end_after:
            os.kill(os.getpid(), signal.SIGTERM)

    def note(self, text: str) -> None:
        self.notes.append(text)


def losses(output: Path) -> list[float]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    return [line["loss"] for line in steps]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model and texts. Runs here compile as the subprocesses do, and all of them once."""
    folder = tmp_path_factory.mktemp("training")
    write_model(folder / "model")
    write_texts(folder / "texts.jsonl")
    write_texts(folder / "few.jsonl", 9)
    make, made = preparation.make_optimizer, {}

    def made_once(settings: Any, axes: Any, *, steps: int) -> Any:
        if (settings, steps) not in made:
            made[settings, steps] = make(settings, axes, steps=steps)
        return made[settings, steps]

    with compiled_quickly(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "make_optimizer", made_once)
        yield folder


@dataclasses.dataclass(frozen=True)
class Undisturbed:
    outcome: Outcome
    watcher: Lines
    output: Path


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Undisturbed:
    watcher = Lines()
    data = {"evaluation": str(folder / "few.jsonl")}
    run = {
        "output": str(folder / "whole"),
        "evaluate_every": 4,
        "questions": ["1 + 1 =", "7"],
        "answer_tokens": 5,
        "tensorboard": True,
    }
    settings = small_run(folder, data=data, run=run)
    return Undisturbed(Trainer(settings, watcher=watcher).run(), watcher, folder / "whole")


def test_the_loss_falls_and_every_step_and_evaluation_is_told(undisturbed: Undisturbed) -> None:
    found = losses(undisturbed.output)
    assert found[-1] < 0.5 * found[0]
    told = undisturbed.watcher.lines
    lines = [line for line in told if "answers" not in line]
    assert [(line["step"], "evaluation_cross_entropy" in line) for line in lines] == [
        (1, False), (2, False), (3, False), (4, False), (4, True), (5, False), (6, False), (6, True)
    ]  # fmt: skip
    assert lines[-1]["evaluation_cross_entropy"] < lines[4]["evaluation_cross_entropy"]
    step = lines[1]
    assert step["tokens_per_second"] == pytest.approx(step["tokens"] / step["seconds"])
    assert step["flops_per_second"] > 0 and "utilization" not in step  # a CPU's is not known
    assert len(list((undisturbed.output / "tensorboard").iterdir())) == 1
    assert 100 < step["tokens"] < 8 * 26 and step["memory_bytes"] > 1e6 and step["gradient_norm"] > 0
    assert [line["learning_rate"] for line in lines[:2]] == pytest.approx([0.005, 0.01])
    text = (undisturbed.output / "metrics.jsonl").read_text()
    assert [json.loads(line) for line in text.splitlines()] == told
    assert undisturbed.watcher.notes[0].startswith("train data: 44 of 44 records")


def test_questions_are_answered_at_the_steps_of_evaluations_by_the_model_of_then(
    undisturbed: Undisturbed,
) -> None:
    told = [line for line in undisturbed.watcher.lines if "answers" in line]
    assert [line["step"] for line in told] == [4, 6]
    assert [[pair["question"] for pair in line["answers"]] for line in told] == [["1 + 1 =", "7"]] * 2
    settings = GenerationSettings(max_new_tokens=5)
    model = load(undisturbed.output / "model", dtype="float32")
    answers = generate(model, ["1 + 1 =", "7"], settings).generations
    assert [pair["answer"] for pair in told[1]["answers"]] == [answer.text for answer in answers]
    assert told[0]["answers"] != told[1]["answers"]


def test_a_run_ends_with_a_picture_of_its_losses(undisturbed: Undisturbed) -> None:
    assert (undisturbed.output / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_trained_model_is_written_as_the_source_was_and_differs_from_it(
    folder: Path, undisturbed: Undisturbed
) -> None:
    outcome = undisturbed.outcome
    assert outcome.model == undisturbed.output / "model" and outcome.stopped_by is None
    assert (outcome.steps, outcome.began_at) == (STEPS, 0)
    names = {path.name for path in (folder / "model").iterdir()}
    assert {path.name for path in outcome.model.iterdir()} == names
    before, after = (jax.tree.leaves(load(path).parameters) for path in (folder / "model", outcome.model))
    assert all(np.any(old != new) for old, new in zip(before, after, strict=True))


def test_a_finished_run_has_nothing_left_to_do(undisturbed: Undisturbed, folder: Path) -> None:
    before = losses(undisturbed.output)
    data = {"evaluation": str(folder / "few.jsonl")}
    outcome = Trainer(small_run(folder, data=data, run={"output": str(undisturbed.output)})).run()
    assert (outcome.steps, outcome.began_at, outcome.last) == (STEPS, STEPS, None)
    assert losses(undisturbed.output) == before


def test_a_gradient_that_is_not_finite_ends_the_run_and_neither_counts_nor_is_saved(folder: Path) -> None:
    model = tiny_model()
    weight = model.parameters["embed_tokens"]["weight"]
    model.parameters["embed_tokens"]["weight"] = weight.at[0, 0].set(jnp.inf)
    write_model(folder / "broken", model)
    settings = small_run(
        folder, model={"source": str(folder / "broken")}, run={"output": str(folder / "stop")}
    )
    with pytest.raises(TrainingError, match=r"step 1: the gradient of .*decoder.* is not finite"):
        Trainer(settings).run()
    assert (folder / "stop" / "metrics.jsonl").read_text() == ""
    assert list((folder / "stop" / "checkpoints").iterdir()) == []


def test_an_orbax_folder_trains_as_the_folder_that_it_came_from(
    folder: Path, undisturbed: Undisturbed
) -> None:
    convert(folder / "model", folder / "orbax")
    settings = small_run(
        folder, model={"source": str(folder / "orbax")}, run={"output": str(folder / "again")}
    )
    outcome = Trainer(settings).run()
    assert losses(folder / "again") == losses(undisturbed.output)
    assert outcome.model is not None
    names = {path.name for path in undisturbed.output.joinpath("model").iterdir()}
    assert {path.name for path in outcome.model.iterdir()} == names


def test_sigterm_saves_first_and_the_next_start_goes_on(folder: Path, undisturbed: Undisturbed) -> None:
    settings = small_run(folder, run={"output": str(folder / "stopped")})
    stopped = Trainer(settings, watcher=Lines(end_after=3)).run()
    assert (stopped.steps, stopped.stopped_by, stopped.model) == (3, signal.SIGTERM, None)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert not (folder / "stopped" / "model").exists()
    watcher = Lines()
    finished = Trainer(settings, watcher=watcher).run()
    assert (finished.steps, finished.began_at) == (STEPS, 3) and finished.model is not None
    assert "going on after step 3 of 6" in watcher.notes
    assert losses(folder / "stopped") == losses(undisturbed.output)


def test_a_run_that_is_killed_goes_on_with_the_same_losses(folder: Path, undisturbed: Undisturbed) -> None:
    killed = subprocess_run(folder, "killed", devices=1)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    outcome = Trainer(small_run(folder, run={"output": str(folder / "killed")})).run()
    assert outcome.began_at in (2, 4)  # whether or not that of step 4 was complete
    assert losses(folder / "killed") == pytest.approx(losses(undisturbed.output), rel=1e-6)


@pytest.mark.extended
def test_b77_saved_on_eight_devices_and_restored_on_four_and_on_one(
    folder: Path, undisturbed: Undisturbed
) -> None:
    done = subprocess_run(folder, "eight", devices=8)
    assert done.returncode == 0, done.stderr[-2000:]
    for devices, found in json.loads(done.stdout.splitlines()[-1]).items():
        assert found.pop("same names"), devices
        assert (found.pop("cut") > 20) == (devices == "four"), devices
        assert found == {"different": [], "zero": [], "misplaced": []}, devices
    outcome = Trainer(small_run(folder, run={"output": str(folder / "one"), "keep": 9})).run()
    assert (outcome.began_at, outcome.steps) == (2, STEPS)
    for output in ("one", "four", "eight"):
        assert losses(folder / output) == pytest.approx(losses(undisturbed.output), rel=1e-5), output


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"data": {"seed": 1}}, r"holds a run of other settings \(data.seed was 0 and is 1 now\)"),
        ({"optimizer": {"beta1": 0.5}}, r"\(optimizer.beta1 was 0.9 and is 0.5 now\)"),
        ({"run": {"steps": STEPS + 1}}, "model: exists and is not empty"),
        ({"run": {"mesh": {"fsdp": 2}}}, r"run.mesh \(fsdp 2\) takes 2 devices, found 1"),
        ({"run": {"mesh": {"time": 1}}}, r"run.mesh has the axes \['time'\], expected some of"),
        (
            {"data": {"row_length": 701}},
            "data.row_length is 701, expected at most 700, the context of the model",
        ),
        ({"objective": {"mtp_weight": 0.1}}, "has no multi-token-prediction head"),
        (
            {"optimizer": {"warmup_steps": 7}},
            "optimizer.warmup_steps is 7, expected no more than the 6 steps",
        ),
    ],
)
def test_what_does_not_fit_the_run_is_refused(
    folder: Path, undisturbed: Undisturbed, sections: dict[str, dict[str, Any]], complaint: str
) -> None:
    run = {"output": str(undisturbed.output)} | sections.pop("run", {})
    with pytest.raises((ConfigError, CheckpointError), match=complaint):
        Trainer(small_run(folder, run=run, **sections)).run()


def test_an_output_that_cannot_be_written_is_refused_and_nothing_is_written(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    for output in (folder / "texts.jsonl" / "run", folder / "texts.jsonl"):
        with pytest.raises(
            CheckpointError, match=r"run.output .* cannot be made, since .*texts.jsonl is a file"
        ):
            Trainer(small_run(folder, run={"output": str(output)})).run()
    assert sorted(folder.rglob("*")) == before


def test_epochs_are_steps_over_all_rows(folder: Path) -> None:
    settings = small_run(folder)
    run = dataclasses.replace(settings.run, steps=None, epochs=1.5)
    # 22 rows, 8 to a step: 2.75 steps an epoch.
    assert prepare(dataclasses.replace(settings, run=run), Watcher()).steps == 5
