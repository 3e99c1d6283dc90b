"""Makes nano, the built-in model: tokenizer, training, evaluation and export to a folder in Hugging Face layout.

    python -m scripts.build_nano WORK_FOLDER [--head-only FOLDER] [--destination FOLDER]

The whole model is trained first, as `qwen35 train` would with the config `nano.toml`, and after that its
multi-token-prediction head alone, on what the model says. With `--head-only` the model comes from a folder, and all of
it but the head stays as it is, bit for bit.

Needs Debian's package `wordnet-base` (or `apt-get` to download it) and the `train` extra. Everything is drawn from one
seed and scheduled by step, so that two runs on one machine give the same file. A run that was stopped in the first part
goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import time
from typing import Any

import jax.numpy as jnp
from flax import nnx
from tokenizers import Tokenizer

from qwen35_jax.checkpoint import load_hf
from qwen35_jax.cli.training_progress import training_progress
from qwen35_jax.config import ModelConfig
from qwen35_jax.model import Parameters, abstract_model
from scripts.build_nano.acceptance import tokens_per_pass
from scripts.build_nano.architecture import hf_config
from scripts.build_nano.continuations import continuations
from scripts.build_nano.corpus import Corpus
from scripts.build_nano.draft_head import ROUNDS, with_trained_head
from scripts.build_nano.evaluation import Evaluator
from scripts.build_nano.export import bfloat16_rounded, export, require_same_but_for_the_head
from scripts.build_nano.training import read_tables, train
from scripts.build_nano.vocabulary import train_tokenizer

SEED = 7
TOKENIZER_TEXTS = 40_000
HEAD_ROWS = 2560
"""What the model says for its head to learn from, in rows of `continuations.LENGTH` tokens."""


@dataclasses.dataclass(frozen=True)
class Nano:
    """The model while it is made, as `qwen35_jax.inference.generate` takes it."""

    config: ModelConfig
    graphdef: nnx.GraphDef
    parameters: Parameters
    folder: None = None


class Log:
    """Prints each entry as a line of JSON, and keeps it in a file."""

    def __init__(self, path: pathlib.Path):
        self.file = path.open("a", encoding="utf-8")
        self.started = time.monotonic()

    def __call__(self, **entries: Any) -> None:
        entries = {
            name: round(value, 4) if isinstance(value, float) else value for name, value in entries.items()
        }
        line = json.dumps(entries | {"seconds": round(time.monotonic() - self.started)})
        print(line, flush=True)
        self.file.write(line + "\n")
        self.file.flush()


def main() -> None:
    """Builds, or goes on building, in a work folder; exports at the end."""
    arguments = _arguments()
    work: pathlib.Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    note = Log(work / "log.jsonl")
    corpus = Corpus()
    if arguments.head_only is None:
        corpus.tokenizer = _tokenizer(work, corpus)
    else:
        corpus.tokenizer = Tokenizer.from_file(str(arguments.head_only / "tokenizer.json"))
    config = ModelConfig.from_hf(hf_config(corpus.tokenizer))
    tables = read_tables()
    folder = arguments.head_only
    if folder is None:
        with training_progress() as watcher:
            outcome = train(work, corpus, config, tables, seed=SEED, watcher=watcher)
        if outcome.model is None:
            raise SystemExit(f"stopped after step {outcome.steps:,}: the same command goes on from there")
        folder = outcome.model
    graphdef, _ = abstract_model(config, parameter_dtype=jnp.float32, dtype=jnp.float32, mtp=True)
    parameters = bfloat16_rounded(load_hf(folder, parameter_dtype=jnp.float32, mtp=True)[1])
    evaluator = Evaluator(corpus, graphdef)
    note(trained=str(folder), evaluation=evaluator(parameters))
    nano = Nano(config, graphdef, parameters)
    said = continuations(nano, corpus, SEED, HEAD_ROWS)
    note(tokens_said=int(said.tokens.size - said.begin.sum()))
    trained = with_trained_head(nano, said, rounds=ROUNDS, seed=SEED, note=note)
    nano = dataclasses.replace(nano, parameters=bfloat16_rounded(trained))
    measured = evaluator(nano.parameters) | tokens_per_pass(nano, corpus, seed=SEED)
    destination = arguments.destination or work / "nano"
    export(
        nano.parameters,
        config,
        corpus.tokenizer,
        destination,
        measured=measured,
        training=tables,
        head_rounds=ROUNDS,
        tokens_said=int(said.tokens.size - said.begin.sum()),
        countries=len(corpus.countries),
    )
    if arguments.head_only is not None:
        require_same_but_for_the_head(arguments.head_only, destination)
    note(exported=str(destination), evaluation=measured)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make the built-in model.")
    parser.add_argument("work", type=pathlib.Path, help="folder for the tokenizer, the training and the log")
    parser.add_argument(
        "--head-only",
        type=pathlib.Path,
        metavar="FOLDER",
        help="train the head of this model, and nothing else",
    )
    parser.add_argument("--destination", type=pathlib.Path, help="folder to export to (default: WORK/nano)")
    return parser.parse_args()


def _tokenizer(work: pathlib.Path, corpus: Corpus) -> Tokenizer:
    path = work / "tokenizer.json"
    if not path.exists():
        train_tokenizer(corpus.texts(SEED, TOKENIZER_TEXTS)).save(str(path))
    return Tokenizer.from_file(str(path))


if __name__ == "__main__":
    main()
