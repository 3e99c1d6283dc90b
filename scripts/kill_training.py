"""Kills a training run again and again, and compares what comes of it with a run that nothing disturbs.

    python scripts/kill_training.py [--kills 20] [--seed N] [--json]

Every start of `qwen35 train` is ended by SIGKILL: half of them as soon as a checkpoint is being written, the others at
a random moment from the start of the process on, while it loads, compiles, trains or saves. Each next start has to go
on from the newest checkpoint that was complete when the one before was killed, or from one completed since. After the
last kill the run ends by itself. Nothing is lost if all losses are those of the undisturbed run, number for number, and
so is the model that is written.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONFIG = """\
[model]
source = "nano"
dtype = "float32"

[data]
train = "{train}"
row_length = 48
rows_per_step = 2
seed = 3

[optimizer]
learning_rate = 1e-3
warmup_steps = 5

[lora]
rank = 4
dropout = 0.1

[run]
output = "{output}"
steps = {steps}
save_every = 2
"""

STARTED_SECONDS = 120.0
"""A start that has made no step by then is taken to hang."""


class Run:
    """One output folder, and the starts that work on it."""

    def __init__(self, folder: Path, name: str, train: Path, steps: int):
        self.output = folder / name
        self._config = folder / f"{name}.toml"
        self._config.write_text(CONFIG.format(train=train, output=self.output, steps=steps))

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "qwen35_jax", "train", "--config", str(self._config)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def complete(self) -> int:
        """The step of the newest complete checkpoint, 0 without one."""
        folder = self.output / "checkpoints"
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return max((int(name) for name in names if name.isdigit()), default=0)

    def unfinished(self) -> set[tuple[str, int]]:
        """Checkpoints that are being written, or were when a start was killed."""
        folder = self.output / "checkpoints"
        return {(path.name, path.stat().st_ino) for path in folder.glob("*tmp*")}

    def has_lines(self) -> bool:
        file = self.output / "metrics.jsonl"
        return file.is_file() and file.stat().st_size > 0

    def lines(self) -> list[dict[str, Any]]:
        text = (self.output / "metrics.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def losses(self) -> list[tuple[int, float]]:
        return [(line["step"], line["loss"]) for line in self.lines() if "loss" in line]

    def weights(self) -> bytes:
        return (self.output / "model" / "model.safetensors").read_bytes()


def went_on_after(errors: str) -> int:
    """The step that a start says it goes on after, 0 for a first one, -1 where it did not come to say so."""
    for line in errors.splitlines():
        if "going on after step" in line:
            return int(line.split("going on after step ")[1].split()[0].replace(",", ""))
    return 0 if "steps; the first one compiles" in errors else -1


def killed_when(process: subprocess.Popen[str], due: Callable[[], bool]) -> str:
    """Waits until it is time, kills the process, and returns what it wrote to standard error."""
    deadline = time.monotonic() + STARTED_SECONDS
    while not due() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    return process.communicate()[1]


def measure(kills: int, seed: int, folder: Path) -> dict[str, Any]:
    """Runs both, and compares."""
    rng = random.Random(seed)
    train = folder / "texts.jsonl"
    texts = [f"The code of {number:03d} is {number * 7919 % 1000:03d}." for number in range(200)]
    train.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    steps = 12 * kills
    undisturbed, killed = (Run(folder, name, train, steps) for name in ("undisturbed", "killed"))
    begun = time.monotonic()
    process = undisturbed.start()
    while process.poll() is None and not undisturbed.has_lines():
        time.sleep(0.05)
    first_step = time.monotonic() - begun
    errors = process.communicate()[1]
    # So late that a start gets its share of the steps done; once it has, it is killed at once.
    latest = first_step + (time.monotonic() - begun - first_step) / kills
    if not (undisturbed.output / "model").is_dir():
        raise SystemExit(f"the undisturbed run failed: {errors[-2000:]}")

    moments, lost = [], 0
    complete = 0
    for kill in range(kills):
        left_over, started = killed.unfinished(), time.monotonic()
        process = killed.start()
        if kill % 2:
            due, moment = (lambda left_over=left_over: bool(killed.unfinished() - left_over)), "while saving"
        else:
            wait = rng.uniform(0.0, latest)
            due, moment = (
                (
                    lambda started=started, wait=wait, share=(kill + 1) / kills: (
                        time.monotonic() - started > wait or killed.complete() >= share * steps - 4
                    )
                ),
                f"after {wait:.1f} s",
            )
        errors = killed_when(process, due)
        if process.returncode != -signal.SIGKILL:
            raise SystemExit(
                f"start {kill + 1} ended by itself with status {process.returncode}: {errors[-2000:]}"
            )
        after = went_on_after(errors)
        lost += after != -1 and after < complete
        complete = killed.complete()
        moments.append({"killed": moment, "went_on_after": after, "complete": complete})
    process = killed.start()
    errors = process.communicate()[1]
    if process.returncode:
        raise SystemExit(f"the last start failed with status {process.returncode}: {errors[-2000:]}")
    lost += went_on_after(errors) < complete
    return {
        "kills": moments,
        "steps": steps,
        "checkpoints_lost": lost,
        "losses_equal": killed.losses() == undisturbed.losses(),
        "model_equal": killed.weights() == undisturbed.weights(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args.kills, args.seed, Path(folder))
    if args.json:
        print(json.dumps(found))
    else:
        for kill in found["kills"]:
            print(
                f"killed {kill['killed']}: went on after step {kill['went_on_after']}, {kill['complete']} complete"
            )
        print(
            f"{len(found['kills'])} kills, {found['steps']} steps: {found['checkpoints_lost']} checkpoints lost, "
            f"losses {'equal' if found['losses_equal'] else 'DIFFERENT'}, "
            f"model {'equal' if found['model_equal'] else 'DIFFERENT'}"
        )
    return 0 if found["losses_equal"] and found["model_equal"] and not found["checkpoints_lost"] else 1


if __name__ == "__main__":
    sys.exit(main())
