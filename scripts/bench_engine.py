"""Speed of the engine, as ratios measured in one run.

    python scripts/bench_engine.py [--parts batch latency prefix overhead speculation] [--config NAME] [--json]

`batch`: tokens drawn in a second with 8 requests at once, over those with one. `latency`: time to the first token of a
short request that comes while a prompt of 4,000 tokens is being consumed, in pieces of that prompt. `prefix`: time to
the first token of a prompt of which 1,024 tokens are remembered, over that of one of which nothing is. `overhead`: time
of a pass in the engine with 8 requests, over that of the bare program. `speculation`: tokens a second of the built-in
model with and without drafts, the tokens of a pass, and the time of a pass. All but the built-in model have random
weights of the 0.8B shape, in bfloat16; they need 12 GiB of memory and a few minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_timing import machine, machine_line

from qwen35_jax.checkpoint import load
from qwen35_jax.checkpoint.source import LoadedModel
from qwen35_jax.config import published
from qwen35_jax.inference.engine import AnswerStream, Engine, Request
from qwen35_jax.inference.engine.slots import decode_slots
from qwen35_jax.inference.generation import generate
from qwen35_jax.inference.programs import PASSES_IN_A_BLOCK
from qwen35_jax.inference.settings import GenerationSettings
from qwen35_jax.inference.speculation import HeadInput, Speculation
from qwen35_jax.model import init_model

ROWS = 8
NEW_TOKENS = 64
LONG_PROMPT = 4000
PIECE = 256
SHARED_PROMPT, QUESTION = 1024, 32
DRAFTS = (0, 1, 2, 3, 4)
LONG_ANSWER = 384


def random_model(name: str, *, mtp: bool) -> Any:
    """Random weights of a published shape, laid out as `load` does on a CPU."""
    config = published(name)
    unroll = jax.default_backend() == "cpu"
    config = dataclasses.replace(config, text=dataclasses.replace(config.text, unroll_layers=unroll))
    graphdef, parameters = init_model(
        config, seed=0, parameter_dtype=jnp.bfloat16, dtype=jnp.bfloat16, mtp=mtp
    )
    return LoadedModel(config, graphdef, jax.block_until_ready(parameters), Path())


def request(length: int, new: int, seed: int) -> Request:
    prompt = np.random.default_rng(seed).integers(0, 1000, length).tolist()
    return Request(tuple(prompt), GenerationSettings(max_new_tokens=new, ignore_eos=True))


def seconds_per_pass(engine: Engine, rows: int) -> float:
    """Between the last request's first token and the end, with so many requests drawing."""
    streams = [engine.submit(request(16, NEW_TOKENS, seed)) for seed in range(rows)]
    passes = iter(streams[-1])
    next(passes)
    start = time.perf_counter()
    left = sum(1 for event in passes if event.token is not None)
    elapsed = time.perf_counter() - start
    for stream in streams:
        stream.result()
    return elapsed / left


def bench_batch(engine: Engine) -> dict[str, Any]:
    one, many = (statistics.median(seconds_per_pass(engine, rows) for _ in range(3)) for rows in (1, ROWS))
    return {
        "name": f"decode throughput with {ROWS} requests, over one",
        "ours_seconds": many,
        "peer": "one request",
        "peer_seconds": one,
        "ratio": ROWS * one / many,
    }


def bench_latency(engine: Engine) -> dict[str, Any]:
    """A short request that comes when a long prompt has just begun."""
    found, pieces = [], []
    for seed in range(3):
        start = time.perf_counter()
        engine.submit(request(LONG_PROMPT, 1, seed)).result()
        pieces.append((time.perf_counter() - start) / -(-LONG_PROMPT // PIECE))
        long: AnswerStream = engine.submit(request(LONG_PROMPT, 1, 50 + seed))
        time.sleep(2 * pieces[-1])
        start = time.perf_counter()
        next(iter(engine.submit(request(16, 1, seed))))
        found.append(time.perf_counter() - start)
        long.result()
    return {
        "name": f"first token of a short request beside a prompt of {LONG_PROMPT} tokens, in pieces of {PIECE}",
        "ours_seconds": statistics.median(found),
        "peer": "a piece",
        "peer_seconds": statistics.median(pieces),
        "ratio": statistics.median(found) / statistics.median(pieces),
    }


def bench_overhead(engine: Engine) -> dict[str, Any]:
    """A pass of the engine against the same program called in a loop on the same slots."""
    in_engine = statistics.median(seconds_per_pass(engine, ROWS) for _ in range(3))
    engine.close()
    runner = engine._runner
    slots, keep, allowed = runner._slots, np.ones(ROWS, bool), runner._anything[ROWS]
    rows = slots.rows._replace(active=jnp.ones(ROWS, bool), step=jnp.zeros(ROWS, jnp.int32))
    limits = slots.limits._replace(max_new_tokens=jnp.full(ROWS, 10_000))
    slots = slots._replace(rows=rows, limits=limits)
    times = []
    for _ in range(1 + NEW_TOKENS // PASSES_IN_A_BLOCK):
        start = time.perf_counter()
        slots, emissions = decode_slots(*runner._static, slots, keep, allowed, steps=PASSES_IN_A_BLOCK)
        jax.block_until_ready(emissions)
        times.append((time.perf_counter() - start) / PASSES_IN_A_BLOCK)
    bare = statistics.median(times[1:])
    return {
        "name": f"a pass of the engine with {ROWS} requests, over the bare program",
        "ours_seconds": in_engine,
        "peer": "the program",
        "peer_seconds": bare,
        "ratio": in_engine / bare,
    }


def bench_prefix(engine: Engine) -> dict[str, Any]:
    """The first token of a prompt of which 1,024 tokens are remembered, against one of which nothing is."""
    cold, warm = [], []
    for seed in range(3):
        shared = request(SHARED_PROMPT, 1, 100 + seed).prompt
        for found, last in ((cold, 1), (warm, 2)):
            prompt = (*shared, *request(QUESTION, 1, last).prompt)
            start = time.perf_counter()
            result = engine.submit(Request(prompt, GenerationSettings(max_new_tokens=1))).result()
            found.append(time.perf_counter() - start)
        assert result.cached_tokens == SHARED_PROMPT, result.cached_tokens
    return {
        "name": f"first token after {SHARED_PROMPT} remembered tokens and {QUESTION} new ones",
        "ours_seconds": statistics.median(warm),
        "peer": "nothing remembered",
        "peer_seconds": statistics.median(cold),
        "ratio": statistics.median(warm) / statistics.median(cold),
    }


def decoding(
    model: Any, prompt: str | list[int], drafts: int, head_input: HeadInput, new: int
) -> tuple[float, float]:
    """Seconds of a pass of one row, and the tokens that a pass gives."""
    speculation = Speculation(drafts, head_input) if drafts else None
    settings = GenerationSettings(max_new_tokens=new, ignore_eos=True)
    result = generate(model, [prompt], settings, speculation=speculation)
    per_pass = result.generations[0].tokens_per_pass
    return per_pass / result.timing.decode_tokens_per_second, per_pass


def bench_speculation() -> Iterable[dict[str, Any]]:
    """The built-in model on sentences that it knows, with each number of drafts in turn."""
    model = load("nano", mtp=True)
    prompts = ["The capital of France", "The capital of Japan", "Once there was", "A bird is"]
    for head_input in ("final_norm", "residual"):
        seconds: dict[int, list[float]] = {drafts: [] for drafts in DRAFTS}
        accepted: dict[int, list[float]] = {drafts: [] for drafts in DRAFTS}
        for _, prompt, drafts in itertools.product(range(5), prompts, DRAFTS):
            of_a_pass, per_pass = decoding(model, prompt, drafts, head_input, LONG_ANSWER)
            seconds[drafts].append(of_a_pass / per_pass)
            accepted[drafts].append(per_pass)
        plain = statistics.median(seconds[0])
        for drafts in DRAFTS[1:]:
            of_a_token, per_pass = statistics.median(seconds[drafts]), statistics.mean(accepted[drafts])
            yield {
                "name": f"speculation with {drafts} drafts, the head reading {head_input}: {per_pass:.2f} tokens a "
                "pass; tokens a second over plain decoding",
                "ours_seconds": of_a_token,
                "peer": "plain decoding",
                "peer_seconds": plain,
                "ratio": plain / of_a_token,
                "tokens_per_pass": per_pass,
            }


def bench_speculative_passes(model: Any) -> Iterable[dict[str, Any]]:
    """What a pass with drafts costs, which says how many tokens it has to give."""
    seconds: dict[int, list[float]] = {drafts: [] for drafts in DRAFTS}
    for _, drafts in itertools.product(range(3), DRAFTS):
        seconds[drafts].append(decoding(model, [1, 2, 3], drafts, "final_norm", 33)[0])
    plain = statistics.median(seconds[0])
    for drafts in DRAFTS[1:]:
        yield {
            "name": f"a pass with {drafts} drafts, over a plain one",
            "ours_seconds": statistics.median(seconds[drafts]),
            "peer": "a plain pass",
            "peer_seconds": plain,
            "ratio": statistics.median(seconds[drafts]) / plain,
        }


PARTS = ("batch", "latency", "prefix", "overhead", "speculation")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--config", default="Qwen/Qwen3.5-0.8B", help="a published shape")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []

    def record(result: dict[str, Any]) -> None:
        results.append(result)
        if not arguments.json:
            print(
                f"{result['name']}: {result['ours_seconds']:.4f} s, {result['peer']} {result['peer_seconds']:.4f} s, "
                f"ratio {result['ratio']:.2f}",
                flush=True,
            )

    if not arguments.json:
        print(machine_line(machine()))
    if "speculation" in arguments.parts:
        for result in bench_speculation():
            record(result)
        for result in bench_speculative_passes(random_model(arguments.config, mtp=True)):
            record(result)
    if set(arguments.parts) - {"speculation"}:
        context = LONG_PROMPT + NEW_TOKENS
        engine = Engine(
            random_model(arguments.config, mtp=False), slots=ROWS, context=context, prefill_tokens=PIECE
        )
        for part, bench in (
            ("batch", bench_batch),
            ("latency", bench_latency),
            ("prefix", bench_prefix),
            ("overhead", bench_overhead),
        ):
            if part in arguments.parts:
                record(bench(engine))
        engine.close()
    if arguments.json:
        print(json.dumps(machine() | {"results": results}))


if __name__ == "__main__":
    main()
