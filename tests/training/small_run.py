"""A run that is over in seconds: a tiny model with random weights, texts, and the settings that join them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from qwen35_jax.checkpoint import export_hf
from qwen35_jax.training.settings import TrainingSettings, settings_from
from qwen35_jax.training.watcher import Watcher
from tests.inference.tiny_model import TinyModel, ascii_tokenizer, tiny_model

ROW_LENGTH, ROWS, STEPS = 26, 8, 6


class Interrupted(Exception):
    pass


class Interrupting(Watcher):
    """Ends the run as an accident would, when the checkpoint of step 2 is there or on its way."""

    def line(self, line: dict[str, Any]) -> None:
        if line["step"] == 4:
            raise Interrupted


@contextlib.contextmanager
def compiled_quickly() -> Iterator[None]:
    """Leaves most of XLA's optimizations out within the block: small runs take longer to compile than to be done."""
    left_out = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", left_out)


def write_model(folder: Path, model: TinyModel | None = None) -> Path:
    """A checkpoint that a run can start from; by default of the tiny model."""
    model = model or tiny_model()
    export_hf(model.parameters, model.config, folder)
    ascii_tokenizer().backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    return folder


def write_texts(path: Path, count: int = 44) -> Path:
    """Sums and what they make, one to a line."""
    texts = [f"{number} + {number % 7} = {number + number % 7}" for number in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def small_run(folder: Path, **sections: dict[str, Any]) -> TrainingSettings:
    """Settings of a run in `folder`, which holds `model` and `texts.jsonl`; sections change single keys."""
    tables: dict[str, dict[str, Any]] = {
        "model": {"source": str(folder / "model"), "dtype": "float32"},
        "data": {"train": str(folder / "texts.jsonl"), "row_length": ROW_LENGTH, "rows_per_step": ROWS},
        "objective": {"rematerialize": "none"},
        "optimizer": {"learning_rate": 0.01, "weight_decay": 0.1, "warmup_steps": 2},
        "run": {"output": str(folder / "run"), "steps": STEPS, "save_every": 2, "seed": 5},
    }
    names = [*tables, *(name for name in sections if name not in tables)]
    return settings_from({name: tables.get(name, {}) | sections.get(name, {}) for name in names})
