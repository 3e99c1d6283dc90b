"""Speed and memory of training on a CPU: loss and all gradients against `transformers`, on the same random weights.

    python scripts/bench_train.py [--parts speed memory] [--rounds 5] [--json]

Needs the `reference` extra. The model is a 4-layer cut of the 0.8B shape, in float32; the batch is one row. Each side
runs in a process of its own, in turn with the other, after one step that compiles and is not timed. `ours` keeps what
the backward pass needs, as `transformers` does; `ours, rematerialized` computes all of it again, the library's default.

- speed: 512 tokens. Medians with the smallest and the largest, the ratio, and the least work with the seconds that it
  takes at the speed of float32 products measured in the same run, the best of both frameworks. Most of it are the
  three products with the output head, which no implementation can do without: that bounds the ratio.
- memory: the most that each process held, weights, gradients and the frameworks themselves included (ru_maxrss), and
  that of this library at 2,048, 4,096 and 8,192 tokens, each in a new process. Growth is bytes per token from the
  second length to the third over those from the first to the second: 1 is linear in the tokens.

About ten minutes on two cores, and 12 GiB of memory.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from bench_cpu import LeastWork, compare, config_of, described, write_random_checkpoint
from bench_timing import REST_SECONDS, Timing, machine, machine_line
from least_work import layer_weights, prefill_flops

from qwen35_jax.config import ModelConfig

SIDE = Path(__file__).with_name("training_side.py")
SPEED_TOKENS = 512
MEMORY_TOKENS = (2048, 4096, 8192)
PARTS = ("speed", "memory")
SIDES = {
    "ours": ["ours", "--rematerialize", "none"],
    "ours, rematerialized": ["ours", "--rematerialize", "all"],
    "transformers": ["transformers"],
}


class Side:
    """A process that computes steps when asked, see `training_side.py`."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process

    def ask(self, *command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self._process.args} ended with status {self._process.wait()}")
        return json.loads(answer)


@contextlib.contextmanager
def started(label: str, folder: Path, tokens: int) -> Iterator[Side]:
    """A side that holds the checkpoint in `folder` and a row of so many tokens."""
    side, *options = SIDES[label]
    command = [sys.executable, str(SIDE), side, str(folder), str(tokens), *options]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Side(process)
    finally:
        process.communicate()  # ends the input, and with it the process


def shallow(config: ModelConfig, layers: int) -> ModelConfig:
    """The first layers of a model, and its embedding."""
    text = dataclasses.replace(
        config.text, num_hidden_layers=layers, layer_types=config.text.layer_types[:layers]
    )
    return dataclasses.replace(config, text=text)


def training_flops(config: ModelConfig, tokens: int) -> int:
    """Of loss and gradients of one row: the gradient of a product is two products.

    Every token but the last one has a target, and its logits.
    """
    logits = 2 * config.text.vocab_size * config.text.hidden_size
    return 3 * (prefill_flops(config, tokens) + (tokens - 2) * logits)


def training_bytes(config: ModelConfig, bytes_per_weight: int) -> int:
    """Of weights: each is read for the forward pass and for the backward pass, and each gradient is written."""
    head = config.text.vocab_size * config.text.hidden_size
    return 3 * bytes_per_weight * (layer_weights(config) + head)


def product_shapes(config: ModelConfig, tokens: int) -> list[list[int]]:
    """(rows, inner, columns) of products that a model of this shape does, and of a large square one."""
    embed, mlp = config.text.hidden_size, config.text.intermediate_size
    assert mlp is not None
    return [[tokens, embed, mlp], [tokens, mlp, embed], [mlp, tokens, embed], [2048, 2048, 2048]]


def bench_speed(
    folder: Path, config: ModelConfig, tokens: int, rounds: int
) -> tuple[dict[str, Any], dict[str, int]]:
    """A result as `bench_cpu.compare` makes it, with the least seconds; and the most memory of each side, by label."""
    with contextlib.ExitStack() as stack:
        sides = {label: stack.enter_context(started(label, folder, tokens)) for label in SIDES}
        losses = {label: side.ask("step")["loss"] for label, side in sides.items()}
        if max(losses.values()) - min(losses.values()) > 1e-4:
            raise SystemExit(f"the sides compute different losses: {losses}")
        seconds: dict[str, list[float]] = {label: [] for label in sides}
        for _ in range(rounds):
            for label, side in sides.items():
                time.sleep(REST_SECONDS)
                seconds[label].append(side.ask("step")["seconds"])
        peaks = {label: side.ask("memory")["peak_bytes"] for label, side in sides.items()}
        shapes = product_shapes(config, tokens)
        gflops = {
            label: max(sides[label].ask("products", shapes)["gflops"]) for label in ("ours", "transformers")
        }
    timings = {label: Timing(tuple(runs)) for label, runs in seconds.items()}
    least = training_flops(config, tokens) / 1e9
    result = compare(
        f"loss and gradients of {tokens} tokens", timings, LeastWork(dict.fromkeys(timings, least), "GFLOP")
    )
    best = max(gflops.values())
    result |= {
        "product_gflops": gflops,
        "least_bytes": training_bytes(config, 4),
        "least_seconds": least / best,
        "largest_ratio": result["peer_seconds"] / (least / best),
        "losses": losses,
    }
    return result, peaks


def bench_memory(folder: Path, lengths: tuple[int, ...]) -> dict[str, int]:
    """The most that this library held at each length, everything rematerialized."""
    peaks = {}
    for tokens in lengths:
        with started("ours, rematerialized", folder, tokens) as side:
            side.ask("step")
            peaks[str(tokens)] = side.ask("memory")["peak_bytes"]
    return peaks


def growth(peaks: dict[str, int]) -> float:
    """Bytes per token between the last two lengths, over those between the first two."""
    (first, low), (second, middle), (third, high) = ((int(tokens), held) for tokens, held in peaks.items())
    return (high - middle) / (third - second) / ((middle - low) / (second - first))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each side")
    parser.add_argument("--layers", type=int, default=4, help="how many of the model's layers are kept")
    parser.add_argument(
        "--config",
        type=config_of,
        default="Qwen/Qwen3.5-0.8B",
        help="shape of the model: a published name or a config.json file",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        parser.error("needs torch and transformers: pip install -e '.[reference]'")

    config = shallow(arguments.config, arguments.layers)
    found: dict[str, Any] = {**machine(), "results": []}
    lines = [machine_line(found)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_random_checkpoint(folder, config)
        if "speed" in arguments.parts:
            result, peaks = bench_speed(folder, config, SPEED_TOKENS, arguments.rounds)
            memory = {
                "tokens": SPEED_TOKENS,
                "bytes": peaks,
                "ratio": peaks[result["ours"]] / peaks["transformers"],
            }
            found["results"].append(result)
            found["peak_memory"] = memory
            speeds = ", ".join(f"{label} {speed:.0f}" for label, speed in result["product_gflops"].items())
            held = ", ".join(f"{label} {gib(size)}" for label, size in peaks.items())
            lines += [
                described(result),
                f"    float32 products, GFLOP/s: {speeds}",
                f"    least at that speed {result['least_seconds']:.2f} s, so that no ratio is above "
                f"{result['largest_ratio']:.2f}; least bytes of weights {result['least_bytes'] / 1e9:.1f} GB",
                f"peak memory at {SPEED_TOKENS} tokens: {held}; {result['ours']} over transformers "
                f"{memory['ratio']:.2f}",
            ]
        if "memory" in arguments.parts:
            peaks = bench_memory(folder, MEMORY_TOKENS)
            found["peak_memory_by_tokens"] = {"bytes": peaks, "growth": growth(peaks)}
            held = ", ".join(f"{tokens} tokens {gib(size)}" for tokens, size in peaks.items())
            lines.append(f"peak memory, rematerialized: {held}; growth {growth(peaks):.2f} (1 is linear)")
    print(json.dumps(found) if arguments.json else "\n".join(lines))


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


if __name__ == "__main__":
    main()
