"""Speed on a CPU, as ratios to `transformers` measured in the same run on the same random weights.

    python scripts/bench_cpu.py [--parts prefill decode rule load compile] [--json]

Needs the `reference` extra. The model has the 0.8B shape: 752,393,024 parameters (`--config` names another). The
programs of a comparison run in turn, each after a rest; a result is the median of its runs, with the smallest and the
largest beside it. A ratio is the reference's time over ours, each in its best dtype; of loading and compiling it is
what the line says, and less is better. Beside each time stands how much of the least work was done in a second: all
products of a prefill or of the rule, or the weights that a decode step has to read. The whole takes about a quarter of
an hour on two cores, and 12 GiB of memory.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import bench_gated_delta_rule
import bench_load
import jax
import jax.numpy as jnp
import numpy as np
from bench_timing import Timing, calls_in_turn, machine, machine_line, time_in_turn
from least_work import decode_bytes, prefill_flops, rule_flops

from qwen35_jax.cache import init_cache
from qwen35_jax.checkpoint import load
from qwen35_jax.config import ModelConfig, published
from qwen35_jax.model import abstract_model, decode_step, forward, prefill

DECODE_CONTEXT = 512
DECODE_ROUNDS, DECODE_STEPS = 6, 8


@dataclasses.dataclass(frozen=True)
class LeastWork:
    """What no program can do without, by program: operations in GFLOP, or bytes in GB."""

    amounts: Mapping[str, float]
    unit: str


def compare(name: str, timings: dict[str, Timing], least: LeastWork) -> dict[str, Any]:
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
        "seconds": {label: timing.median for label, timing in timings.items()},
        "spread": {label: timing.spread for label, timing in timings.items()},
        "least_work": dict(least.amounts),
        "unit": least.unit,
        "per_second": {label: least.amounts[label] / timing.median for label, timing in timings.items()},
    }


def against_itself(name: str, timings: dict[str, Timing], ours: str, peer: str) -> dict[str, Any]:
    """A result whose ratio is ours over what it is held against: less is better."""
    return {
        "name": name,
        "ours": ours,
        "ours_seconds": timings[ours].median,
        "peer": peer,
        "peer_seconds": timings[peer].median,
        "ratio": timings[ours].median / timings[peer].median,
        "seconds": {label: timings[label].median for label in (ours, peer)},
        "spread": {label: timings[label].spread for label in (ours, peer)},
    }


def described(result: dict[str, Any]) -> str:
    """A result in a line, and a line a program."""
    lines = [
        f"{result['name']}: {result['ours']} {result['ours_seconds']:.3f} s, "
        f"{result['peer']} {result['peer_seconds']:.3f} s, ratio {result['ratio']:.2f}"
    ]
    for label, (least, most) in result["spread"].items():
        line = f"    {label}: {result['seconds'][label]:.3f} s ({least:.3f} to {most:.3f})"
        if "unit" in result:
            unit = result["unit"]
            line += f"; least {result['least_work'][label]:.4g} {unit}, {result['per_second'][label]:.4g} {unit}/s"
        lines.append(line)
    return "\n".join(lines)


def write_random_checkpoint(folder: Path, config: ModelConfig) -> Any:
    """A random text model of a shape, written by `transformers` in bfloat16; returns its torch model."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    hf = config.to_hf()
    text = {key: value for key, value in hf.get("text_config", hf).items() if key != "model_type"}
    text |= {"tie_word_embeddings": config.tie_word_embeddings}
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
    config = models["float32"].config
    vocabulary = config.text.vocab_size
    labels = [f"{side} {name}" for side in ("ours", "transformers") for name in models]

    def ours_prefill(name: str, tokens: jax.Array) -> Any:
        model = models[name]
        capacity = tokens.shape[1] + calls_in_turn(DECODE_ROUNDS, calls_per_run=DECODE_STEPS)
        cache = init_cache(model.config.text, batch=1, capacity=capacity, dtype=jnp.dtype(name))
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
            least = LeastWork(dict.fromkeys(labels, prefill_flops(config, length) / 1e9), "GFLOP")
            yield compare(f"prefill of {length} tokens", time_in_turn(programs, rounds=3), least)

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
        timings = time_in_turn(programs, rounds=DECODE_ROUNDS, calls_per_run=DECODE_STEPS)
        read = {label: decode_bytes(config, jnp.dtype(label.split()[1]).itemsize) / 1e9 for label in labels}
        yield compare("decode of one token", timings, LeastWork(read, "GB"))


def bench_loading(folder: Path) -> Iterable[dict[str, Any]]:
    """Loading the checkpoint against reading its file to memory, and against streaming it through one buffer."""
    found = bench_load.measure(folder, rounds=3, cold=False)
    for peer, what in (
        ("read", "reading its file to memory"),
        ("stream", "streaming its file through a buffer"),
    ):
        name = f"load of a {found.nbytes / 1e9:.1f} GB checkpoint, over {what}"
        yield against_itself(name, found.timings, "load", peer)


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

    programs = {f"{layers} layers": functools.partial(compile_with, layers) for layers in (8, 64)}
    name = "compile of 64 layers of the 27B shape, over 8 layers"
    return against_itself(name, time_in_turn(programs, rounds=3), "64 layers", "8 layers")


def bench_rule() -> Iterable[dict[str, Any]]:
    """The chunked gated delta rule alone, against the reference's chunk function: 4,096 tokens, 16 heads of 128."""
    arrays = bench_gated_delta_rule.inputs(*bench_gated_delta_rule.SHAPES["long"])
    for backward in (False, True):
        programs = {
            "ours float32": bench_gated_delta_rule.ours(arrays, method="chunked", backward=backward),
            "transformers float32": bench_gated_delta_rule.peer(arrays, backward=backward),
        }
        name = "gated delta rule, forward" + (" and backward" if backward else "")
        _, tokens, _, key_dim = arrays[1].shape
        _, _, value_heads, value_dim = arrays[2].shape
        # The gradient of a product is two products.
        flops = (3 if backward else 1) * rule_flops(tokens, value_heads, key_dim, value_dim)
        least = LeastWork(dict.fromkeys(programs, flops / 1e9), "GFLOP")
        yield compare(name, time_in_turn(programs, rounds=5), least)


def config_of(name: str) -> ModelConfig:
    """The config of that published name, or in that file."""
    return ModelConfig.from_hf(Path(name)) if name.endswith(".json") else published(name)


PARTS = ("prefill", "decode", "rule", "load", "compile")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument(
        "--config",
        type=config_of,
        default="Qwen/Qwen3.5-0.8B",
        help="shape of the model of prefill, decode and load: a published name or a config.json file",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        parser.error("needs torch and transformers: pip install -e '.[reference]'")
    parts = set(arguments.parts)

    results: list[dict[str, Any]] = []

    def record(found: Iterable[dict[str, Any]]) -> None:
        for result in found:
            results.append(result)
            if not arguments.json:
                print(described(result), flush=True)

    here = machine()
    if not arguments.json:
        print(machine_line(here), flush=True)
    if parts & {"prefill", "decode", "load"}:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            reference = write_random_checkpoint(folder, arguments.config)
            if "load" in parts:
                record(bench_loading(folder))
            if parts & {"prefill", "decode"}:
                record(bench_prefill_and_decode(parts, folder, reference))
    if "rule" in parts:
        record(bench_rule())
    if "compile" in parts:
        record([bench_compile()])
    if arguments.json:
        print(json.dumps({**here, "results": results}))


if __name__ == "__main__":
    main()
