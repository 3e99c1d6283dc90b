"""The training of the built-in model as a run of the trainer, at a small size: its data, its steps, its export."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from qwen35_jax.checkpoint import load_hf
from qwen35_jax.config import ModelConfig
from qwen35_jax.model import abstract_model
from qwen35_jax.training.packed_files import packed_file
from qwen35_jax.training.settings import OptimizerSettings
from qwen35_jax.training.trainer import Outcome
from qwen35_jax.training.watcher import Watcher
from scripts.build_nano.architecture import hf_config
from scripts.build_nano.corpus import Corpus
from scripts.build_nano.curriculum import CURRICULUM_STEPS, LAST_STAGE_STEP, progress
from scripts.build_nano.dialogues import dialogue_document
from scripts.build_nano.documents import Document, document
from scripts.build_nano.draft_head import ROUNDS
from scripts.build_nano.evaluation import predictions
from scripts.build_nano.export import HERE, bfloat16_rounded, export
from scripts.build_nano.training import Tables, read_tables, settings_in, train
from tests.test_nano import FOLDER
from tests.training.small_run import compiled_quickly

SEED, STEPS, ROWS, LENGTH = 3, 4, 2, 176
SMALL: dict[str, dict[str, Any]] = {
    "data": {"rows_per_step": ROWS, "row_length": LENGTH},
    "optimizer": {"warmup_steps": 1, "decay_steps": 2},
    "run": {"steps": STEPS, "save_every": 2, "evaluate_every": STEPS, "questions": []},
}


class Dialogues(Corpus):
    """A corpus of one kind, for which no dictionary is needed."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    def draw(self, kind: str, rng: random.Random, progress: float) -> Document:
        return dialogue_document(rng)


class Run(NamedTuple):
    """What was trained, and of what."""

    folder: Path
    corpus: Dialogues
    config: ModelConfig
    tables: Tables
    outcome: Outcome


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("work")
    corpus = Dialogues(Tokenizer.from_file(str(FOLDER / "tokenizer.json")))
    assert corpus.tokenizer is not None
    cut = {
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "layer_types": ["linear_attention"],
    }
    config = ModelConfig.from_hf(hf_config(corpus.tokenizer) | cut)
    tables = {name: {**table, **SMALL.get(name, {})} for name, table in read_tables().items()}
    with compiled_quickly():
        outcome = train(folder, corpus, config, tables, seed=SEED, watcher=Watcher())
    return Run(folder, corpus, config, tables, outcome)


def test_the_trainer_learns_the_rows_of_the_corpus_in_their_order_with_their_weights(run: Run) -> None:
    packed, summary = packed_file(
        str(run.folder / "curriculum.jsonl"),
        run.folder / "start",
        row_length=LENGTH,
        too_long="drop",
        pad_id=0,
        order="as_written",
    )
    assert len(packed) == STEPS * ROWS and summary.documents == summary.records > len(packed)
    for step in range(STEPS):
        expected = run.corpus.batch(SEED, step, rows=ROWS, length=LENGTH, progress=progress(step))
        found = packed.batch(np.arange(step * ROWS, (step + 1) * ROWS))
        for name in ("tokens", "segment_ids", "weights"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
        assert {0.0, np.float32(0.1), 1.0} <= set(expected.weights.flat)


def test_the_first_step_has_the_loss_of_the_starting_model_on_the_first_rows(run: Run) -> None:
    graphdef, _ = abstract_model(run.config, parameter_dtype="float32", dtype="float32", mtp=True)
    parameters = load_hf(run.folder / "start", parameter_dtype="float32", mtp=True)[1]
    batch = run.corpus.batch(SEED, 0, rows=ROWS, length=LENGTH, progress=0)
    _, losses, _ = predictions(
        graphdef, parameters, jnp.asarray(batch.tokens), jnp.asarray(batch.segment_ids)
    )
    expected = float(jnp.sum(losses * batch.weights) / batch.weights.sum())
    lines = [json.loads(line) for line in (run.folder / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    assert lines[0]["cross_entropy"] == pytest.approx(expected, rel=1e-5)
    assert lines[0]["mtp_cross_entropy"] > 0
    assert lines[-1]["cross_entropy"] < lines[0]["cross_entropy"]
    assert [line["learning_rate"] for line in lines] == pytest.approx([0.02, 0.02, 0.02, 0.01])


def test_what_was_trained_is_exported_rounded_with_a_card(run: Run) -> None:
    assert run.outcome.steps == STEPS and run.outcome.model is not None
    trained = load_hf(run.outcome.model, parameter_dtype="float32", mtp=True)[1]
    assert any(
        bool(jnp.any(leaf != rounded))
        for leaf, rounded in zip(*map(jax.tree.leaves, (trained, bfloat16_rounded(trained))), strict=True)
    ), "the run keeps float32"
    card = (HERE / "model_card.md").read_text(encoding="utf-8")
    measured = [name for _, name, _, _ in string.Formatter().parse(card) if name and name.endswith(MEASURED)]
    assert run.corpus.tokenizer is not None
    export(
        trained,
        run.config,
        run.corpus.tokenizer,
        run.folder / "nano",
        measured=dict.fromkeys(measured, 0.5),
        training=run.tables,
        head_rounds=ROUNDS,
        tokens_said=12_345,
        countries=7,
    )
    found = load_hf(run.folder / "nano", parameter_dtype="float32", mtp=True)[1]
    for leaf, rounded in zip(*map(jax.tree.leaves, (found, bfloat16_rounded(trained))), strict=True):
        np.testing.assert_array_equal(leaf, rounded)
    for name in ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json", "generation_config.json"):
        assert (run.folder / "nano" / name).read_bytes() == (FOLDER / name).read_bytes(), name
    written = (run.folder / "nano/README.md").read_text(encoding="utf-8")
    assert f"{STEPS} steps of {ROWS * LENGTH} tokens" in written and "1,000 steps of 3,072 tokens" in written


MEASURED = ("capitals", "capitals_chat", "recall", "recall_chat", "loss", "accuracy", "drafts")


def test_the_config_is_one_of_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "curriculum.jsonl").touch()
    settings = settings_in(tmp_path, read_tables())
    assert settings.model.source == str(tmp_path / "start") and settings.run.output == str(tmp_path / "run")
    assert settings.data.order == "as_written" and settings.objective.mtp_weight == 0.2
    assert settings.data.rows_per_step * settings.data.row_length == 4096
    assert settings.optimizer == OptimizerSettings(
        name="muon",
        learning_rate=0.02,
        adam_learning_rate=0.004,
        schedule="linear",
        warmup_steps=40,
        decay_steps=450,
        beta2=0.98,
        weight_decay=0.01,
    )


def test_the_curriculum_rises_and_ends_with_a_stage_of_its_own() -> None:
    assert [progress(step) for step in (0, CURRICULUM_STEPS // 2, CURRICULUM_STEPS)] == [0.0, 0.5, 1.0]
    assert progress(LAST_STAGE_STEP - 1) == 1.0 and progress(LAST_STAGE_STEP) == 2.0


def test_the_parts_of_a_document_are_its_text_cut_where_the_weight_changes() -> None:
    drawn = document(("a question", 0.1), "an answer", " of two", ("\n", 0.1), ("", 5.0))
    assert drawn.parts == [("a question", 0.1), ("an answer of two", 1.0), ("\n", 0.1)]
