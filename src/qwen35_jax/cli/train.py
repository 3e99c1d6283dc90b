"""`qwen35 train`: fine-tune a model as a config file says."""

from __future__ import annotations

import argparse
import json
import logging
import time
from typing import TYPE_CHECKING, Any

from qwen35_jax.cli.options import add_json_option, loading_progress
from qwen35_jax.errors import ConfigError

if TYPE_CHECKING:
    from qwen35_jax.training.trainer import Outcome

HELP = (
    "Fine-tune a model on chats or texts (JSONL), as a config file says (TOML; its sections and keys are those of "
    "qwen35_jax.training.settings). The output folder holds checkpoints, the numbers of every step (metrics.jsonl) "
    "and at the end the model in Hugging Face layout. The same command goes on from the last checkpoint, whatever "
    "ended the run before. SIGTERM and Ctrl-C save first; a second one does not."
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, metavar="FILE", help="a TOML file that describes the run")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    from qwen35_jax.inference.compilation_cache import enable_compilation_cache
    from qwen35_jax.training.settings import read_settings

    settings = read_settings(args.config)
    try:
        from qwen35_jax.cli.training_progress import training_progress
        from qwen35_jax.training.trainer import Trainer
    except ImportError as error:
        raise ConfigError(
            f"training needs {error.name}, which is not installed: pip install 'qwen35-jax[train]'"
        ) from error

    enable_compilation_cache()
    for library in ("absl", "asyncio"):
        # A save that fails is told in one line, and by these in fifty.
        logging.getLogger(library).setLevel(logging.CRITICAL)
    began = time.perf_counter()
    with training_progress() as watcher:
        outcome = Trainer(settings, watcher=watcher, progress=loading_progress).run()
    if args.json:
        report = _report(outcome, time.perf_counter() - began)
        print(json.dumps(report | {"output": settings.run.output}))
    else:
        print(_for_people(outcome, settings.run.output))
    return 0 if outcome.stopped_by is None else 128 + outcome.stopped_by


def _report(outcome: Outcome, seconds: float) -> dict[str, Any]:
    return {
        "steps": outcome.steps,
        "began_at": outcome.began_at,
        "cross_entropy": outcome.last["cross_entropy"] if outcome.last else None,
        "evaluation_cross_entropy": (
            outcome.evaluation["evaluation_cross_entropy"] if outcome.evaluation else None
        ),
        "model": None if outcome.model is None else str(outcome.model),
        "stopped_by": None if outcome.stopped_by is None else outcome.stopped_by.name,
        "seconds": seconds,
    }


def _for_people(outcome: Outcome, output: str) -> str:
    if outcome.stopped_by is not None:
        return (
            f"stopped by {outcome.stopped_by.name} after step {outcome.steps:,}, which is saved in {output}: the same "
            "command goes on from there"
        )
    if outcome.last is None:
        return f"nothing left to do: all {outcome.steps:,} steps were done before; the model is in {outcome.model}"
    from qwen35_jax.cli.training_progress import line_for_people

    return f"{line_for_people(outcome.evaluation or outcome.last)}; the model is in {outcome.model}"
