"""A run with `[preference]` learns which answers are chosen, goes on with the reference that it began with."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen35_jax.errors import CheckpointError, ConfigError
from qwen35_jax.training.objective import Objective
from qwen35_jax.training.preference.objective import Preference
from qwen35_jax.training.settings import TrainingSettings, settings_from
from qwen35_jax.training.trainer import Outcome, Trainer
from tests.training.small_run import (
    STEPS,
    Interrupted,
    Interrupting,
    compiled_quickly,
    small_run,
    write_model,
)

PREFERENCE = Preference(beta=0.5, rematerialize="none")


def pairs_run(folder: Path, output: str, **sections: dict[str, Any]) -> TrainingSettings:
    data = {"train": str(folder / "pairs.jsonl"), "evaluation": str(folder / "few.jsonl"), "rows_per_step": 4}
    run = {"output": str(folder / output), "evaluate_every": 3}
    settings = small_run(folder, data=data, run=run, **sections)
    return dataclasses.replace(settings, objective=Objective(), preference=PREFERENCE)


def lora_run(folder: Path, output: str) -> TrainingSettings:
    return pairs_run(folder, output, lora={"rank": 3}, optimizer={"learning_rate": 0.05})


def write_pairs(path: Path, count: int) -> None:
    """The chosen answer is right, and the rejected one is not."""
    lines = [
        {"prompt": f"{n}+1", "chosen": f"={n + 1}", "rejected": f"={n - 1} no"} for n in range(1, count + 1)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("pairs")
    write_model(folder / "model")
    write_pairs(folder / "pairs.jsonl", 20)
    write_pairs(folder / "few.jsonl", 5)
    with compiled_quickly():
        yield folder


@pytest.fixture(scope="module")
def done(folder: Path) -> Outcome:
    return Trainer(lora_run(folder, "whole")).run()


def lines(output: Path, name: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if name in line]


def test_the_loss_starts_where_model_and_reference_are_one_and_falls(folder: Path, done: Outcome) -> None:
    steps = lines(folder / "whole", "loss")
    assert len(steps) == STEPS
    assert abs(steps[0]["loss"] - np.log(2)) <= 1e-5
    assert abs(steps[0]["margin"]) <= 1e-5
    assert steps[-1]["loss"] < 0.9 * steps[0]["loss"]
    assert steps[-1]["accuracy"] > 0.9
    evaluations = lines(folder / "whole", "evaluation_margin")
    assert [line["step"] for line in evaluations] == [3, 6]
    assert evaluations[-1]["evaluation_loss"] < np.log(2)
    assert done.model is not None and done.model.is_dir()
    assert (folder / "whole" / "loss.png").is_file()


def test_a_run_that_is_gone_on_with_has_the_losses_and_the_reference_of_an_undisturbed_one(
    folder: Path, done: Outcome
) -> None:
    settings = lora_run(folder, "again")
    with pytest.raises(Interrupted):
        Trainer(settings, watcher=Interrupting()).run()
    kept = folder / "again" / "reference.npz"
    hidden = kept.rename(folder / "hidden.npz")
    with pytest.raises(CheckpointError, match=r"reference.npz: cannot be read"):
        Trainer(settings).run()
    hidden.rename(kept)
    assert Trainer(settings).run().began_at == 2
    for name in ("loss", "margin"):
        undisturbed, resumed = (
            [line[name] for line in lines(folder / run, "loss")] for run in ("whole", "again")
        )
        np.testing.assert_array_equal(resumed, undisturbed)


def test_all_parameters_can_be_trained_on_pairs(folder: Path) -> None:
    settings = pairs_run(folder, "full")
    Trainer(dataclasses.replace(settings, run=dataclasses.replace(settings.run, steps=2))).run()
    first, second = lines(folder / "full", "loss")
    assert abs(first["loss"] - np.log(2)) <= 1e-5
    assert second["gradient_norm"] > 0


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"objective": {"z_loss": 0.1}}, r"\[objective\] is given beside \[preference\]"),
        ({"objective": {}, "data": {"too_long": "cut"}}, r"too_long is 'cut', but pairs .* are never cut"),
        (
            {"objective": {}, "preference": {"beta": -1}},
            r"\[preference\] beta is -1.0, expected a number above 0",
        ),
        ({"preference": {"betta": 1}}, r"\[preference\] betta is no key .* beta, perhaps"),
    ],
)
def test_settings_that_do_not_go_with_pairs_are_refused(
    folder: Path, sections: dict[str, dict[str, Any]], complaint: str
) -> None:
    tables: dict[str, dict[str, Any]] = {
        "data": {"train": str(folder / "pairs.jsonl"), "row_length": 26, "rows_per_step": 4},
        "run": {"output": "run", "steps": 1},
        "preference": {},
    }
    names = {*tables, *sections}
    with pytest.raises(ConfigError, match=complaint):
        settings_from({name: tables.get(name, {}) | sections.get(name, {}) for name in names})
