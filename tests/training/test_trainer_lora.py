"""A run with `[lora]` trains an adapter alone, goes on with it, and writes it both by itself and added to the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from qwen35_jax.checkpoint import load
from qwen35_jax.checkpoint.hf import load_hf
from qwen35_jax.errors import CheckpointError, ConfigError
from qwen35_jax.training.lora import LoRA, merged
from qwen35_jax.training.peft import read_peft
from qwen35_jax.training.settings import TrainingSettings
from qwen35_jax.training.trainer import Outcome, Trainer
from tests.training.small_run import (
    STEPS,
    Interrupted,
    Interrupting,
    compiled_quickly,
    small_run,
    write_model,
    write_texts,
)

LORA = {"rank": 3, "alpha": 6, "dropout": 0.1, "targets": ["q_proj", "in_proj_qkv", "down_proj"]}


def lora_run(folder: Path, output: str, **run: Any) -> TrainingSettings:
    questions = {"evaluate_every": 4, "questions": ["1 + 1 ="], "answer_tokens": 5}
    return small_run(
        folder,
        lora=LORA,
        data={"evaluation": str(folder / "few.jsonl"), "micro_batches": 2},
        optimizer={"learning_rate": 0.05},
        run={"output": str(folder / output), **questions, **run},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("lora")
    write_model(folder / "model")
    write_texts(folder / "texts.jsonl")
    write_texts(folder / "few.jsonl", 9)
    with compiled_quickly():
        yield folder


@pytest.fixture(scope="module")
def done(folder: Path) -> Outcome:
    return Trainer(lora_run(folder, "whole")).run()


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_the_loss_falls_and_only_adapted_maps_change(folder: Path, done: Outcome) -> None:
    steps = [line for line in lines(folder / "whole") if "loss" in line]
    assert len(steps) == STEPS and steps[-1]["loss"] < 0.8 * steps[0]["loss"]
    assert done.model is not None
    before, after = (load(path).parameters for path in (folder / "model", done.model))
    changed = {
        path[-1].key
        for (path, old), new in zip(
            jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
        )
        if np.any(old != new)
    }
    # The rows of q_proj are queries and gates, those of in_proj_qkv queries, keys and values.
    assert changed == {"q_weight", "gate_weight", "k_weight", "v_weight", "down_weight"}


def test_the_adapter_by_itself_added_to_the_source_is_the_model(folder: Path, done: Outcome) -> None:
    config, parameters, _ = load_hf(folder / "model")
    adapter, settings = read_peft(folder / "whole" / "adapter", config)
    assert (settings.rank, settings.alpha, settings.dropout) == (3, 6, 0.1)
    assert set(settings.targets) == set(LORA["targets"])
    fields = json.loads((folder / "whole" / "adapter" / "adapter_config.json").read_text())
    assert fields["base_model_name_or_path"] == str(folder / "model")
    assert done.model is not None
    added = merged(parameters, adapter, settings)
    for ours, theirs in zip(jax.tree.leaves(added), jax.tree.leaves(load_hf(done.model)[1]), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def test_an_interrupted_run_goes_on_with_the_same_losses_and_answers(folder: Path, done: Outcome) -> None:
    settings = lora_run(folder, "interrupted")
    with pytest.raises(Interrupted):
        Trainer(settings, watcher=Interrupting()).run()
    outcome = Trainer(settings).run()
    assert (outcome.began_at, outcome.steps) == (2, STEPS)
    timeless = [
        [
            {key: value for key, value in line.items() if "second" not in key and "memory" not in key}
            for line in lines(folder / output)
        ]
        for output in ("interrupted", "whole")
    ]
    assert timeless[0] == timeless[1]


def test_a_checkpoint_holds_the_adapter_and_not_the_model(folder: Path, done: Outcome) -> None:
    saved = sum(
        file.stat().st_size
        for file in (folder / "whole" / "checkpoints" / str(STEPS)).rglob("*")
        if file.is_file()
    )
    model = sum(file.stat().st_size for file in (folder / "model").glob("*.safetensors"))
    adapter = (folder / "whole" / "adapter" / "adapter_model.safetensors").stat().st_size
    assert adapter < model / 2
    assert saved < 3 * adapter + 400_000


@pytest.mark.parametrize(
    ("lora", "complaint"),
    [
        (LORA | {"rank": 4}, "lora.rank was 3 and is 4 now"),
        (LORA | {"targets": "all-linear"}, r"lora.targets was \['q_proj', .*\] and is 'all-linear' now"),
    ],
)
def test_a_run_does_not_go_on_with_another_adapter(
    folder: Path, done: Outcome, lora: dict[str, Any], complaint: str
) -> None:
    data = {"micro_batches": 2}
    settings = small_run(
        folder, lora=lora, data=data, optimizer={"learning_rate": 0.05}, run={"output": str(folder / "whole")}
    )
    with pytest.raises(ConfigError, match=complaint):
        Trainer(settings).run()


def test_an_adapter_folder_that_is_in_the_way_is_refused_before_the_model_is_read(folder: Path) -> None:
    (folder / "taken" / "adapter").mkdir(parents=True)
    (folder / "taken" / "adapter" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="adapter"):
        Trainer(lora_run(folder, "taken")).run()
    assert [path.name for path in (folder / "taken" / "adapter").iterdir()] == ["mine.txt"]


def test_a_target_that_the_model_lacks_is_refused(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"\[lora\] targets is \('w_pack',\), expected 'all-linear' or a list"
    ):
        small_run(folder, lora={"targets": ["w_pack"]})
    assert small_run(folder, lora={}).lora == LoRA()
    assert small_run(folder).lora is None
