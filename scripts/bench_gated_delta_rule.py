"""Times the gated delta rule against the chunk function of Hugging Face transformers, in one run on one machine.

    python scripts/bench_gated_delta_rule.py [--shape train] [--method recurrent] [--repeats 5] [--json]

Both sides get the same float32 numbers, already normalised, and both may use all cores (`--threads` sets torch's).
Calls alternate, ours and theirs with a rest between, so that a busy machine slows both. "ratio" is their median time
over ours; "spread" is the range of the ratios of neighbouring calls. With `--without-peer` torch and
transformers need not be installed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_timing import machine, machine_line, time_in_turn

from qwen35_jax.ops.gated_delta_rule import gated_delta_rule

SHAPES = {  # batch, time, key heads, value heads, head size
    "long": (1, 4096, 16, 16, 128),
    "prefill-512": (1, 512, 16, 16, 128),
    "prefill-2048": (1, 2048, 16, 16, 128),
    "grouped": (1, 2048, 16, 32, 128),
    "small-train": (16, 256, 4, 4, 32),
}


def inputs(batch: int, tokens: int, key_heads: int, value_heads: int, size: int) -> list[np.ndarray]:
    """Random q, k, v, log_decay and beta, as the layers hand them over."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, batch, tokens, key_heads, size))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(batch, tokens, value_heads, size))
    log_decay = -0.1 * rng.uniform(size=(batch, tokens, value_heads))
    beta = rng.uniform(size=(batch, tokens, value_heads))
    return [x.astype(np.float32) for x in (q * size**-0.5, k, v, log_decay, beta)]


def ours(arrays: list[np.ndarray], *, method: str, backward: bool) -> Callable[[], object]:
    on_device = [jnp.asarray(x) for x in arrays]

    def loss(*arrays):
        outputs, state = gated_delta_rule(*arrays, method=method)
        return jnp.sum(outputs), (outputs, state)

    if backward:
        function = jax.jit(jax.grad(loss, argnums=range(5), has_aux=True))
    else:
        function = jax.jit(lambda *arrays: loss(*arrays)[1])
    return lambda: jax.block_until_ready(function(*on_device))


def peer(arrays: list[np.ndarray], *, backward: bool) -> Callable[[], object]:
    import torch
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    group = arrays[2].shape[2] // arrays[0].shape[2]
    # Their function scales q itself and wants one key head per value head.
    arrays = [arrays[0] * arrays[0].shape[-1] ** 0.5, *arrays[1:]]
    arrays = [np.repeat(x, group, axis=2) if i < 2 else x for i, x in enumerate(arrays)]
    tensors = [torch.from_numpy(x).requires_grad_(backward) for x in arrays]

    def call():
        q, k, v, log_decay, beta = tensors
        outputs, _ = torch_chunk_gated_delta_rule(q, k, v, g=log_decay, beta=beta)
        if backward:
            for tensor in tensors:
                tensor.grad = None
            outputs.sum().backward()

    return call


def measure(our_call: Callable[[], object], peer_call: Callable[[], object] | None, repeats: int) -> dict:
    calls = {"ours": our_call} | ({"peer": peer_call} if peer_call else {})
    timings = time_in_turn(calls, rounds=repeats)
    result: dict[str, Any] = {f"{name}_seconds": timing.median for name, timing in timings.items()}
    if peer_call:
        ours, theirs = timings["ours"].runs, timings["peer"].runs
        ratios = [peer / our for our, peer in zip(ours, theirs, strict=True)]
        result["ratio"] = result["peer_seconds"] / result["ours_seconds"]
        result["spread"] = [min(ratios), max(ratios)]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: all, one --shape each")
    parser.add_argument("--method", default="auto", choices=["auto", "recurrent", "chunked", "associative"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of torch")
    parser.add_argument("--without-peer", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    if not options.without_peer:
        import torch

        torch.set_num_threads(options.threads)
    here = machine()
    if not options.json:
        print(machine_line(here), flush=True)

    results = []
    for shape in options.shape or SHAPES:
        arrays = inputs(*SHAPES[shape])
        for backward in (False, True):
            peer_call = None if options.without_peer else peer(arrays, backward=backward)
            result = measure(
                ours(arrays, method=options.method, backward=backward), peer_call, options.repeats
            )
            result = {"name": f"{shape} {'forward+backward' if backward else 'forward'}", **result}
            results.append(result)
            if not options.json:
                line = f"{result['name']:30}  ours {result['ours_seconds']:8.4f} s"
                if peer_call:
                    low, high = result["spread"]
                    line += f"  transformers {result['peer_seconds']:8.4f} s"
                    line += f"  ratio {result['ratio']:6.2f}  ({low:.2f} to {high:.2f})"
                print(line, flush=True)
    if options.json:
        print(json.dumps({**here, "results": results}))


if __name__ == "__main__":
    main()
