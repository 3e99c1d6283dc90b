#!/usr/bin/env python
"""How long a checkpoint takes to load, beside the time to read its files: the ratio, measured in one run.

Reading means bringing the bytes of the weight files to memory. For comparison the files are also streamed
through one small buffer, which needs no memory for what was read and is the least that any reader can take.
By default a checkpoint of the 0.8B shape with random weights (1.5 GB) is written to a temporary folder first.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from bench_timing import Timing, machine

from qwen35_jax.checkpoint import load
from qwen35_jax.checkpoint.export import without_mtp
from qwen35_jax.checkpoint.index import open_weight_files
from qwen35_jax.checkpoint.safetensors_file import TensorToWrite, make_header, write_safetensors
from qwen35_jax.checkpoint.tensor_table import SPELLINGS, bound_tensors
from qwen35_jax.config import ModelConfig

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a folder in Hugging Face layout, instead of a random one")
    parser.add_argument(
        "--config", default="qwen3.5-0.8b", help="shape of the random one, a name in configs/"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cold", action="store_true", help="drop the files from the page cache before each reading"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or write_random(Path(scratch), CONFIGS / f"{args.config}.json")
        report(args, measure(folder, rounds=args.rounds, cold=args.cold))


def write_random(folder: Path, config_file: Path) -> Path:
    """A bfloat16 checkpoint of the text model that a config describes."""
    config = without_mtp(ModelConfig.from_hf(config_file))
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    block = np.random.default_rng(0).integers(0x3C00, 0x3C80, size=1 << 24, dtype=np.uint16)
    tensors = []
    for tensor in bound_tensors(config, SPELLINGS[0], mtp=False, lm_head=False):
        values = lambda shape=tensor.shape: np.resize(block, shape).view(ml_dtypes.bfloat16)  # noqa: E731
        tensors.append(TensorToWrite(tensor.name, np.dtype(ml_dtypes.bfloat16), tensor.shape, values))
    header = make_header(tensors, {"format": "pt"})
    write_safetensors(folder / "model.safetensors", tensors, header, advance=lambda count: None)
    return folder


@dataclasses.dataclass(frozen=True)
class Measured:
    """Seconds to `read`, `stream` and `load` files of so many bytes."""

    nbytes: int
    timings: dict[str, Timing]

    @property
    def ratios(self) -> list[float]:
        """Loading over reading, round by round."""
        load, read = self.timings["load"].runs, self.timings["read"].runs
        return [ours / theirs for ours, theirs in zip(load, read, strict=True)]

    @property
    def ratio_to_stream(self) -> float:
        return self.timings["load"].median / self.timings["stream"].median


def measure(folder: Path, *, rounds: int, cold: bool) -> Measured:
    """Times reading and loading in turns, so that both see the machine in the same state."""
    weights = open_weight_files(folder)
    files = [folder / name for name in weights.files]

    buffer = memoryview(bytearray(16 << 20))

    def read() -> object:
        return [file.read_bytes() for file in files]

    def stream() -> None:
        for file in files:
            with open(file, "rb", buffering=0) as opened:
                while opened.readinto(buffer):
                    pass

    def load_once() -> object:
        return jax.block_until_ready(load(folder).parameters)

    load_once()  # starts JAX and, unless cold, warms the page cache
    tasks: dict[str, Callable[[], object]] = {"stream": stream, "read": read, "load": load_once}
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, task in tasks.items():
            if cold:
                forget(files)
            seconds[name].append(timed(task))
    return Measured(weights.nbytes, {name: Timing(tuple(runs)) for name, runs in seconds.items()})


def timed(task: Callable[[], object]) -> float:
    start = time.perf_counter()
    result = task()
    elapsed = time.perf_counter() - start
    del result  # freeing memory is not part of either
    return elapsed


def forget(files: list[Path]) -> None:
    """Drop files from the page cache."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def report(args: argparse.Namespace, found: Measured) -> None:
    ratio, spread = statistics.median(found.ratios), (min(found.ratios), max(found.ratios))
    read, load, stream = (found.timings[name].median for name in ("read", "load", "stream"))
    if args.json:
        result = {"bytes": found.nbytes, "cold": args.cold, "ratio": ratio, "spread": spread}
        result |= {f"{name}_seconds": timing.median for name, timing in found.timings.items()}
        print(json.dumps({**machine(), **result, "ratio_to_stream": found.ratio_to_stream}))
        return
    print(f"checkpoint of {found.nbytes / 1e9:.2f} GB, {'cold' if args.cold else 'warm'} page cache")
    print(f"read {read:.2f} s, load {load:.2f} s")
    print(f"ratio {ratio:.2f} (from {spread[0]:.2f} to {spread[1]:.2f} in {args.rounds} rounds)")
    print(f"streamed through one buffer {stream:.2f} s, ratio {found.ratio_to_stream:.2f}")


if __name__ == "__main__":
    sys.exit(main())
