"""Speed on a CPU, as ratios to `transformers` measured in the same run on the same random weights.

    python scripts/bench_cpu.py [--parts prefill decode rule load compile] [--json]

Needs the `reference` extra. The model has the 0.8B shape: 752,393,024 parameters. The programs of a comparison run in
turn; each result is the median of its runs, with the smallest and the largest beside it. A ratio is the reference's
time over ours, each in its best dtype; of loading and compiling it is what the line says, and less is better. The
whole takes about ten minutes on two cores, and 12 GiB of memory.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import bench_gated_delta_rule
import jax
import jax.numpy as jnp
import numpy as np

from qwen35_jax.cache import init_cache
from qwen35_jax.checkpoint import load
from qwen35_jax.config import ModelConfig, published
from qwen35_jax.model import abstract_model, decode_step, forward, prefill

DECODE_CONTEXT = 512


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of the runs of one program."""

    runs: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.runs)

    def __str__(self) -> str:
        return f"{self.median:.3f} s ({min(self.runs):.3f} to {max(self.runs):.3f})"


def time_in_turn(programs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Timing]:
    """Runs every program once to warm up, then all of them in turn, `rounds` times."""
    for program in programs.values():
        program()
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            start = time.perf_counter()
            program()
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(runs)) for name, runs in seconds.items()}


def compare(name: str, timings: dict[str, Timing]) -> dict[str, Any]:
    """The best of ours against the best of the reference's."""

    def best(prefix: str) -> tuple[str, Timing]:
        mine = {label: timing for label, timing in timings.items() if label.startswith(prefix)}
        label = min(mine, key=lambda label: mine[label].median)
        return label, mine[label]

    (ours_label, ours), (peer_label, peer) = best("ours"), best("transformers")
    return {
        "name": name,
        "ours": ours_label,
        "ours_seconds": ours.median,
        "peer": peer_label,
        "peer_seconds": peer.median,
        "ratio": peer.median / ours.median,
        "spread": {label: [min(t.runs), max(t.runs)] for label, t in timings.items()},
    }


def write_random_checkpoint(folder: Path) -> Any:
    """A random model of the 0.8B shape, written by `transformers` in bfloat16; returns its torch model."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    text = published("Qwen/Qwen3.5-0.8B").to_hf()["text_config"]
    text = {key: value for key, value in text.items() if key != "model_type"} | {"tie_word_embeddings": True}
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**text)).to(torch.bfloat16).eval()
    model.save_pretrained(folder)
    return model


def bench_prefill_and_decode(parts: set[str], folder: Path, reference: Any) -> Iterable[dict[str, Any]]:
    """Whole-model prefill of 512 and 2,048 tokens, and single decode steps after 512."""
    import torch

    references = {"bfloat16": reference, "float32": copy.deepcopy(reference).float()}
    models = {
        name: load(folder, dtype=dtype, parameter_dtype=dtype)
        for name, dtype in (("bfloat16", jnp.bfloat16), ("float32", jnp.float32))
    }
    vocabulary = models["float32"].config.text.vocab_size

    def ours_prefill(name: str, tokens: jax.Array) -> Any:
        model = models[name]
        cache = init_cache(model.config.text, batch=1, capacity=tokens.shape[1] + 64, dtype=jnp.dtype(name))
        return jax.block_until_ready(prefill(model.graphdef, model.parameters, tokens, cache))

    def peer_prefill(name: str, tokens: Any) -> Any:
        with torch.inference_mode():
            return references[name](input_ids=tokens, use_cache=True, logits_to_keep=1)

    if "prefill" in parts:
        for length in (512, 2048):
            ids = np.random.default_rng(length).integers(0, vocabulary, (1, length))
            tokens, peer_tokens = jnp.asarray(ids, jnp.int32), torch.from_numpy(ids)
            programs = {f"ours {name}": functools.partial(ours_prefill, name, tokens) for name in models}
            programs |= {
                f"transformers {name}": functools.partial(peer_prefill, name, peer_tokens)
                for name in references
            }
            yield compare(f"prefill of {length} tokens", time_in_turn(programs, rounds=3))

    if "decode" in parts:
        ids = np.random.default_rng(1).integers(0, vocabulary, (1, DECODE_CONTEXT))
        caches = {name: ours_prefill(name, jnp.asarray(ids, jnp.int32))[1] for name in models}
        peer_caches = {name: peer_prefill(name, torch.from_numpy(ids)).cache for name in references}

        def ours_step(name: str) -> None:
            model = models[name]
            logits, caches[name] = decode_step(model.graphdef, model.parameters, jnp.array([7]), caches[name])
            jax.block_until_ready(logits)

        def peer_step(name: str) -> None:
            with torch.inference_mode():
                references[name](input_ids=torch.tensor([[7]]), cache=peer_caches[name], use_cache=True)

        programs = {f"ours {name}": functools.partial(ours_step, name) for name in models}
        programs |= {f"transformers {name}": functools.partial(peer_step, name) for name in references}
        yield compare("decode of one token", time_in_turn(programs, rounds=12))


def bench_load(folder: Path) -> dict[str, Any]:
    """Loading the checkpoint against reading its file once."""
    file = folder / "model.safetensors"
    buffer = bytearray(1 << 24)

    def read() -> None:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass

    def load_all() -> None:
        jax.block_until_ready(load(folder, dtype=jnp.bfloat16).parameters)

    timings = time_in_turn({"read": read, "load": load_all}, rounds=3)
    return {
        "name": "load of a 1.5 GB checkpoint, over reading its file",
        "ours_seconds": timings["load"].median,
        "peer": "read",
        "peer_seconds": timings["read"].median,
        "ratio": timings["load"].median / timings["read"].median,
        "spread": {label: [min(t.runs), max(t.runs)] for label, t in timings.items()},
    }


def bench_compile() -> dict[str, Any]:
    """Tracing and compiling a training forward of the 27B shape, 64 layers against 8, without weights."""
    config = published("Qwen/Qwen3.8-27B")

    def compile_with(layers: int) -> None:
        text = dataclasses.replace(
            config.text, num_hidden_layers=layers, layer_types=config.text.layer_types[:layers]
        )
        shallow: ModelConfig = dataclasses.replace(config, text=text)
        graphdef, parameters = abstract_model(shallow, parameter_dtype=jnp.bfloat16, dtype=jnp.bfloat16)
        tokens = jax.ShapeDtypeStruct((1, 512), jnp.int32)
        jax.clear_caches()
        jax.jit(lambda parameters, tokens: forward(graphdef, parameters, tokens)).lower(
            parameters, tokens
        ).compile()

    timings = time_in_turn(
        {"8 layers": lambda: compile_with(8), "64 layers": lambda: compile_with(64)}, rounds=3
    )
    return {
        "name": "compile of 64 layers of the 27B shape, over 8 layers",
        "ours_seconds": timings["64 layers"].median,
        "peer": "8 layers",
        "peer_seconds": timings["8 layers"].median,
        "ratio": timings["64 layers"].median / timings["8 layers"].median,
        "spread": {label: [min(t.runs), max(t.runs)] for label, t in timings.items()},
    }


def bench_rule() -> Iterable[dict[str, Any]]:
    """The chunked gated delta rule alone, against the reference's chunk function: 4,096 tokens, 16 heads of 128."""
    arrays = bench_gated_delta_rule.inputs(*bench_gated_delta_rule.SHAPES["long"])
    for backward in (False, True):
        programs = {
            "ours float32": bench_gated_delta_rule.ours(arrays, method="chunked", backward=backward),
            "transformers float32": bench_gated_delta_rule.peer(arrays, backward=backward),
        }
        name = "gated delta rule, forward" + (" and backward" if backward else "")
        yield compare(name, time_in_turn(programs, rounds=5))


PARTS = ("prefill", "decode", "rule", "load", "compile")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    parts = set(arguments.parts)

    results: list[dict[str, Any]] = []

    def record(result: dict[str, Any]) -> None:
        results.append(result)
        if not arguments.json:
            print(
                f"{result['name']}: {result.get('ours', 'ours')} {result['ours_seconds']:.3f} s, "
                f"{result['peer']} {result['peer_seconds']:.3f} s, ratio {result['ratio']:.2f}",
                flush=True,
            )
            for label, (least, most) in result["spread"].items():
                print(f"    {label}: {least:.3f} to {most:.3f} s")

    if parts & {"prefill", "decode", "load"}:
        with tempfile.TemporaryDirectory() as temporary:
            reference = write_random_checkpoint(Path(temporary))
            if "load" in parts:
                record(bench_load(Path(temporary)))
            for result in bench_prefill_and_decode(parts, Path(temporary), reference):
                record(result)
    if "rule" in parts:
        for result in bench_rule():
            record(result)
    if "compile" in parts:
        record(bench_compile())
    if arguments.json:
        print(
            json.dumps(
                {
                    "device": jax.devices()[0].device_kind,
                    "versions": {"jax": jax.__version__},
                    "results": results,
                }
            )
        )


if __name__ == "__main__":
    main()
