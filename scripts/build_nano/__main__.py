"""Makes nano, the built-in model: tokenizer, training, evaluation and export to a folder in Hugging Face layout.

    python -m scripts.build_nano WORK_FOLDER [--steps N] [--destination FOLDER]

Needs Debian's package `wordnet-base` (or `apt-get` to download it). Everything is drawn from one seed and scheduled
by step, so that two runs on one machine give the same file. A run that was stopped goes on from its last snapshot.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from qwen35_jax.config import ModelConfig
from qwen35_jax.model import init_model
from scripts.build_nano.architecture import hf_config
from scripts.build_nano.corpus import Batch, Corpus
from scripts.build_nano.drawn_ahead import drawn_ahead
from scripts.build_nano.evaluation import Evaluator
from scripts.build_nano.export import bfloat16_rounded, export
from scripts.build_nano.initialization import mimetic
from scripts.build_nano.training import Schedule, optimizer, train_step
from scripts.build_nano.vocabulary import train_tokenizer

SEED = 7
TOKENIZER_TEXTS = 40_000
SCHEDULE = Schedule(steps=1600, decay_steps=450)
EVALUATE_EVERY = 200
SNAPSHOT_EVERY = 100


def main() -> None:
    """Builds, or goes on building, in a work folder; exports at the end."""
    arguments = _arguments()
    work: pathlib.Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    corpus = Corpus()
    corpus.tokenizer = _tokenizer(work, corpus)
    config = ModelConfig.from_hf(hf_config(corpus.tokenizer))
    graphdef, parameters = init_model(
        config, seed=SEED, parameter_dtype=jnp.float32, dtype=jnp.float32, mtp=True
    )
    parameters = mimetic(parameters)
    state = (parameters, optimizer(SCHEDULE).init(parameters))
    first, state = _restore(work / "snapshot.npz", state)
    evaluator = Evaluator(corpus, graphdef)
    log = (work / "log.jsonl").open("a", encoding="utf-8")
    started = time.monotonic()

    def note(**entries: Any) -> None:
        entries = {
            name: round(value, 4) if isinstance(value, float) else value for name, value in entries.items()
        }
        line = json.dumps(entries | {"seconds": round(time.monotonic() - started)})
        print(line, flush=True)
        log.write(line + "\n")
        log.flush()

    note(parameters=sum(leaf.size for leaf in jax.tree.leaves(parameters)), first_step=first)

    def draw(step: int) -> Batch:
        return corpus.batch(
            SEED, step, rows=SCHEDULE.rows, length=SCHEDULE.length, progress=SCHEDULE.progress(step)
        )

    for step, batch in drawn_ahead(draw, range(first, arguments.steps)):
        parameters, optimizer_state, measures = train_step(
            graphdef, SCHEDULE, *state, batch.tokens, batch.segment_ids, batch.weights
        )
        state = (parameters, optimizer_state)
        if step % 20 == 0:
            note(step=step, **{name: float(value) for name, value in measures.items()})
        done = step + 1
        if done % SNAPSHOT_EVERY == 0 or done == arguments.steps:
            _save(work / "snapshot.npz", done, state)
        if done % EVALUATE_EVERY == 0 and done < arguments.steps:
            note(step=done, evaluation=evaluator(bfloat16_rounded(state[0])))
    destination = arguments.destination or work / "nano"
    measured = evaluator(bfloat16_rounded(state[0]))
    export(
        state[0],
        config,
        corpus.tokenizer,
        destination,
        measured=measured,
        schedule=SCHEDULE,
        countries=len(corpus.countries),
    )
    note(exported=str(destination), evaluation=measured)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make the built-in model.")
    parser.add_argument("work", type=pathlib.Path, help="folder for the tokenizer, snapshots and the log")
    parser.add_argument("--steps", type=int, default=SCHEDULE.steps, help="stop after this many steps")
    parser.add_argument("--destination", type=pathlib.Path, help="folder to export to (default: WORK/nano)")
    return parser.parse_args()


def _tokenizer(work: pathlib.Path, corpus: Corpus) -> Tokenizer:
    path = work / "tokenizer.json"
    if not path.exists():
        train_tokenizer(corpus.texts(SEED, TOKENIZER_TEXTS)).save(str(path))
    return Tokenizer.from_file(str(path))


def _save(path: pathlib.Path, step: int, state: Any) -> None:
    leaves = {str(index): np.asarray(leaf) for index, leaf in enumerate(jax.tree.leaves(state))}
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, step=step, **leaves)
    partial.replace(path)


def _restore(path: pathlib.Path, state: Any) -> tuple[int, Any]:
    if not path.exists():
        return 0, state
    with np.load(path) as stored:
        leaves, structure = jax.tree.flatten(state)
        restored = [jnp.asarray(stored[str(index)], leaf.dtype) for index, leaf in enumerate(leaves)]
        return int(stored["step"]), jax.tree.unflatten(structure, restored)


if __name__ == "__main__":
    main()
