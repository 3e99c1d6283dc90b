"""The training of the whole model: a run of `qwen35_jax.training.Trainer`, with nano.toml as its config."""

from __future__ import annotations

import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any

from qwen35_jax.config import ModelConfig
from qwen35_jax.model import init_model
from qwen35_jax.training.settings import TrainingSettings, settings_from
from qwen35_jax.training.trainer import Outcome, Trainer
from qwen35_jax.training.watcher import Watcher
from scripts.build_nano.corpus import Corpus
from scripts.build_nano.curriculum import write_curriculum
from scripts.build_nano.export import write_model
from scripts.build_nano.initialization import mimetic

CONFIG_FILE = pathlib.Path(__file__).parent / "nano.toml"

Tables = Mapping[str, Mapping[str, Any]]
"""The sections of a config file."""


def read_tables(path: pathlib.Path = CONFIG_FILE) -> Tables:
    """The sections of the training's config file, whose paths are relative to a work folder."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def settings_in(work: pathlib.Path, tables: Tables) -> TrainingSettings:
    """The settings of the training in a work folder, which holds its data."""
    changed = {name: dict(table) for name, table in tables.items()}
    for section, key in (("model", "source"), ("data", "train"), ("run", "output")):
        changed[section][key] = str(work / changed[section][key])
    return settings_from(changed)


def train(
    work: pathlib.Path, corpus: Corpus, config: ModelConfig, tables: Tables, *, seed: int, watcher: Watcher
) -> Outcome:
    """Trains the whole model, or goes on with it, in a work folder.

    The starting model and the data are written first, if they are not there yet.

    Args:
        work: the folder.
        corpus: source of the data, with the tokenizer.
        config: of the model.
        tables: from `read_tables`.
        seed: of the starting model and of the data.
        watcher: told of the progress.
    """
    assert corpus.tokenizer is not None
    start, data = work / tables["model"]["source"], work / tables["data"]["train"]
    if not start.exists():
        _, parameters = init_model(config, seed=seed, parameter_dtype="float32", dtype="float32", mtp=True)
        write_model(mimetic(parameters), config, corpus.tokenizer, start)
    if not data.exists():
        watcher.note(f"drawing the data of {tables['run']['steps']:,} steps")
        write_curriculum(
            data,
            corpus,
            seed=seed,
            steps=tables["run"]["steps"],
            rows=tables["data"]["rows_per_step"],
            length=tables["data"]["row_length"],
        )
    return Trainer(settings_in(work, tables), watcher=watcher).run()
