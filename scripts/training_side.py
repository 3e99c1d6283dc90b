"""One side of `bench_train.py`, in a process of its own: the loss of a batch and all gradients, when asked for.

    python scripts/training_side.py {ours,transformers} FOLDER TOKENS [--rematerialize none]

Reads commands from standard input, a line each, and answers each with a line of JSON: `step` computes loss and
gradients once, `products` multiplies matrices of the model's shapes in float32, `memory` tells the most that the
process has held. It imports one framework only, so that its memory is that of one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

PRODUCT_ROUNDS = 9


def ours(
    folder: Path, tokens: int, rematerialize: str
) -> tuple[Callable[[], float], Callable[[int, int, int], Any]]:
    """This library: a function that computes loss and gradients and returns the loss, and one that multiplies."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax
    import jax.numpy as jnp

    from qwen35_jax.checkpoint import load
    from qwen35_jax.training.objective import Batch, Objective, batch_loss, totals_of

    model = load(folder, dtype=jnp.float32, parameter_dtype=jnp.float32)
    ids = jnp.asarray(token_ids(model.config.text.vocab_size, tokens), jnp.int32)
    batch = Batch(ids, jnp.ones_like(ids), jnp.ones(ids.shape, jnp.float32))
    objective = Objective(rematerialize=rematerialize)  # type: ignore[arg-type] # a choice of the command line
    gradients = jax.jit(jax.grad(batch_loss, has_aux=True), static_argnums=(1, 4))

    def step() -> float:
        found = gradients(model.parameters, model.graphdef, batch, totals_of(batch), objective)
        return float(jax.block_until_ready(found)[1].loss)

    def multiplier(rows: int, inner: int, columns: int) -> Callable[[], object]:
        one, other = jnp.ones((rows, inner)), jnp.ones((columns, inner))
        multiply = jax.jit(lambda one, other: jnp.einsum("mk,nk->mn", one, other))
        return lambda: jax.block_until_ready(multiply(one, other))

    return step, multiplier


def transformers(folder: Path, tokens: int) -> tuple[Callable[[], float], Callable[[int, int, int], Any]]:
    """The same of `transformers`: `loss.backward()`, with the token ids as labels."""
    import torch
    from transformers import Qwen3_5ForCausalLM, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    ids = torch.from_numpy(token_ids(model.config.vocab_size, tokens))

    def step() -> float:
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.item()

    def multiplier(rows: int, inner: int, columns: int) -> Callable[[], object]:
        one, other = torch.ones(rows, inner), torch.ones(columns, inner)
        return lambda: one @ other.T

    return step, multiplier


def token_ids(vocabulary: int, tokens: int) -> np.ndarray:
    """One row, the same for both sides."""
    return np.random.default_rng(tokens).integers(0, vocabulary, (1, tokens))


def product_gflops(
    multiplier: Callable[[int, int, int], Callable[[], object]], shapes: list[list[int]]
) -> list[float]:
    """GFLOP/s of `[rows inner] x [columns inner]^T` for each (rows, inner, columns): the fastest of a few calls."""
    found = []
    for rows, inner, columns in shapes:
        multiply = multiplier(rows, inner, columns)
        multiply()
        seconds = min(timed(multiply)[0] for _ in range(PRODUCT_ROUNDS))
        found.append(2 * rows * inner * columns / seconds / 1e9)
    return found


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what the call returned."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def peak_bytes() -> int:
    """The most memory that this process has held, as the system counts it."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("side", choices=("ours", "transformers"))
    parser.add_argument("folder", type=Path, help="a checkpoint in Hugging Face layout")
    parser.add_argument("tokens", type=int, help="length of the one row")
    parser.add_argument("--rematerialize", default="none", help="what this library computes again")
    arguments = parser.parse_args()
    if arguments.side == "ours":
        step, multiplier = ours(arguments.folder, arguments.tokens, arguments.rematerialize)
    else:
        step, multiplier = transformers(arguments.folder, arguments.tokens)
    for line in sys.stdin:
        command, *rest = json.loads(line)
        if command == "step":
            seconds, loss = timed(step)
            answer: dict[str, Any] = {"seconds": seconds, "loss": loss}
        elif command == "products":
            answer = {"gflops": product_gflops(multiplier, rest[0])}
        else:
            answer = {"peak_bytes": peak_bytes()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
