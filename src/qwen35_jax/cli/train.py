"""`qwen35 train`: fine-tune a model as a config file says."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from qwen35_jax.cli.options import add_json_option, loading_progress
from qwen35_jax.errors import ConfigError

if TYPE_CHECKING:
    from qwen35_jax.training.rendezvous import ProcessPlace
    from qwen35_jax.training.trainer import Outcome

HELP = (
    "Fine-tune a model on chats, texts or pairs of answers (JSONL), as a config file says (TOML; its sections and "
    "keys are those of qwen35_jax.training.settings). The output folder holds checkpoints, the numbers of every step "
    "(metrics.jsonl) and at the end the model in Hugging Face layout. The same command goes on from the last "
    "checkpoint, whatever ended the run before. SIGTERM and Ctrl-C save first; a second one does not. Over several "
    "hosts the same command runs on each of them: under SLURM (srun), Open MPI and on TPU pods the processes find each "
    "other, elsewhere the last three options say where and which each one is. All of them need the same files, and "
    "an output folder that they share."
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, metavar="FILE", help="a TOML file that describes the run")
    add_json_option(parser)
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="address of process 0, the same for all processes"
    )
    parser.add_argument(
        "--processes", type=int, metavar="N", help="how many there are; 1: alone, whatever started it"
    )
    parser.add_argument("--process", type=int, metavar="I", help="which of them this one is, from 0 to N - 1")


def run(args: argparse.Namespace) -> int:
    from qwen35_jax.inference.compilation_cache import enable_compilation_cache
    from qwen35_jax.training.settings import read_settings

    settings = read_settings(args.config)
    place = _place(args)
    try:
        from qwen35_jax.cli.training_progress import training_progress
        from qwen35_jax.training.processes import is_first, joined
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
    if place is not None:
        _keep_standard_output_clean()
    with joined(place):
        if not is_first():  # which has told all that there is to tell
            return _status(Trainer(settings).run())
        with training_progress() as watcher:
            outcome = Trainer(settings, watcher=watcher, progress=loading_progress).run()
        if args.json:
            report = _report(outcome, time.perf_counter() - began)
            print(json.dumps(report | {"output": settings.run.output}))
        else:
            print(_for_people(outcome, settings.run.output))
        return _status(outcome)


def _place(args: argparse.Namespace) -> ProcessPlace | None:
    """Which process this is, as the options say; None where they leave that to the launcher."""
    from qwen35_jax.training.rendezvous import ProcessPlace, check_place

    given = {name: getattr(args, name) for name in ("coordinator", "processes", "process")}
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if given["processes"] == 1 and len(missing) == 2:
        return ProcessPlace("", 1, 0)
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} missing: several processes need all three of {', '.join(given)}"
        )
    place = ProcessPlace(args.coordinator, args.processes, args.process)
    check_place(place)
    return place


def _keep_standard_output_clean() -> None:
    """Sends to standard error what libraries below Python print, as Gloo does, which joins processes on CPUs."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)


def _status(outcome: Outcome) -> int:
    return 0 if outcome.stopped_by is None else 128 + outcome.stopped_by


def _report(outcome: Outcome, seconds: float) -> dict[str, Any]:
    return {
        "steps": outcome.steps,
        "began_at": outcome.began_at,
        "loss": (outcome.last or {}).get("loss"),
        "cross_entropy": (outcome.last or {}).get("cross_entropy"),
        "evaluation_loss": (outcome.evaluation or {}).get("evaluation_loss"),
        "evaluation_cross_entropy": (outcome.evaluation or {}).get("evaluation_cross_entropy"),
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
