"""Drawing the next token: penalties, temperature, top-k, top-p, min-p and the draw, each row on its own.

Nothing here sorts the vocabulary. Top-k and top-p ask for a threshold, "the largest value such that what
lies at or above it weighs enough", and that is found bit by bit over the ordered bits of the logits: 32 sums
over the vocabulary instead of a sort of 248,320 numbers, exact, and the same work for every setting, or none
where no row asks. (On a CPU the 32 sums take 2 ms and XLA's sort 800 ms.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from qwen35_jax.inference.settings import GenerationSettings

GREEDY_BELOW = 1e-5
"""Temperatures below this take the most likely token: dividing by them would only overflow."""


class Sampling(NamedTuple):
    """The settings of every row as arrays, so that changing one compiles nothing."""

    temperature: Float[Array, "batch"]
    top_k: Int[Array, "batch"]
    top_p: Float[Array, "batch"]
    min_p: Float[Array, "batch"]
    repetition_penalty: Float[Array, "batch"]
    presence_penalty: Float[Array, "batch"]
    frequency_penalty: Float[Array, "batch"]
    tells_logprobs: Bool[Array, "batch"]
    seed: UInt32[Array, "batch"]


def stack_settings(settings: Sequence[GenerationSettings], seeds: Sequence[int]) -> Sampling:
    """One array per field. `seeds` stands in for the settings' own, where None still has to be drawn."""

    def column(name: str, dtype: type) -> Array:
        return jnp.asarray(np.array([getattr(row, name) for row in settings], dtype))

    return Sampling(
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int32),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        repetition_penalty=column("repetition_penalty", np.float32),
        presence_penalty=column("presence_penalty", np.float32),
        frequency_penalty=column("frequency_penalty", np.float32),
        tells_logprobs=jnp.asarray(np.array([row.top_logprobs is not None for row in settings])),
        seed=jnp.asarray(np.array(seeds, np.uint32)),
    )


def penalize(
    logits: Float[Array, "batch vocab"],
    sampling: Sampling,
    *,
    seen: Bool[Array, "batch vocab"],
    counts: Int[Array, "batch vocab"],
) -> Float[Array, "batch vocab"]:
    """Applies the repetition penalty to `seen` tokens, and the two others to those that the answer has `counts` of."""

    def per_row(setting: Float[Array, "batch"]) -> Float[Array, "batch 1"]:
        return setting[:, None].astype(logits.dtype)

    penalty = per_row(sampling.repetition_penalty)
    repeated = jnp.where(logits > 0, logits / penalty, logits * penalty)
    present = jnp.where(counts > 0, per_row(sampling.presence_penalty), 0)
    frequent = per_row(sampling.frequency_penalty) * counts.astype(logits.dtype)
    return jnp.where(seen, repeated, logits) - present - frequent


def truncate(logits: Float[Array, "batch vocab"], sampling: Sampling) -> Float[Array, "batch vocab"]:
    """Applies the temperature and sets the logits that top-k, top-p or min-p drop to minus infinity.

    In this order, each over what the one before left, as in `transformers`. Tokens tied with the last one
    kept are kept too. At least the most likely token always stays.

    Returns:
        Float32 logits, shifted so that each row's largest is 0.
    """
    logits = logits.astype(jnp.float32)
    # The shift comes first: a small temperature then only drives values to minus infinity.
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    logits = logits / jnp.maximum(sampling.temperature, GREEDY_BELOW)[:, None]
    order = _ordered_bits(logits)

    limited = sampling.top_k > 0
    count = jnp.where(limited, sampling.top_k, jnp.inf)
    kept = order >= _threshold(order, jnp.ones_like(logits), count, limited)

    weights = jnp.where(kept, jnp.exp(logits), 0)  # unnormalised: the largest is 1
    limited = sampling.top_p < 1
    mass = jnp.where(limited, sampling.top_p, jnp.inf) * jnp.sum(weights, axis=-1)
    kept &= order >= _threshold(order, weights, mass, limited)

    kept &= weights >= sampling.min_p[:, None]
    return jnp.where(kept, logits, -jnp.inf)


def draw(
    logits: Float[Array, "batch vocab"], sampling: Sampling, step: Int[Array, "batch"]
) -> Int[Array, "batch"]:
    """Draws a token per row, the `step`-th of its answer.

    The randomness of a row is a function of its seed and step alone: batch mates, padding and the way the
    prompt was cut into chunks leave it as it is. Rows with a temperature below 1e-5 get the most likely token
    (the lowest id among equals), and a batch of such rows does none of the work of a draw.

    Args:
        logits: penalised; minus infinity where a token may not be drawn.
        step: tokens that each row has generated before this one.
    """
    greedy = most_likely(logits)
    is_random = sampling.temperature >= GREEDY_BELOW

    def sampled() -> Int[Array, "batch"]:
        def row(row_logits: Float[Array, "vocab"], seed: Array, row_step: Array) -> Array:
            key = jax.random.fold_in(jax.random.key(seed), row_step)
            noise = jax.random.gumbel(key, row_logits.shape, jnp.float32)
            return most_likely(row_logits + noise)

        tokens = jax.vmap(row)(truncate(logits, sampling), sampling.seed, step)
        return jnp.where(is_random, tokens, greedy)

    return jax.lax.cond(jnp.any(is_random), sampled, lambda: greedy)


def most_likely(logits: Float[Array, "*batch vocab"]) -> Int[Array, "*batch"]:
    """The token with the largest logit, the lowest id among equals; the last id where a logit is NaN.

    Two plain reductions, which every backend vectorises. `jnp.argmax` is one over pairs, ten times slower on a CPU.
    """
    vocab = logits.shape[-1]
    largest = jnp.max(logits, axis=-1, keepdims=True)
    ids = jnp.where(logits == largest, jnp.arange(vocab, dtype=jnp.int32), vocab - 1)
    return jnp.min(ids, axis=-1)


def _ordered_bits(values: Float[Array, "batch vocab"]) -> UInt32[Array, "batch vocab"]:
    """Maps float32 to unsigned integers in the same order, minus infinity lowest."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits & sign, ~bits, bits | sign)


def _threshold(
    order: UInt32[Array, "batch vocab"],
    weights: Float[Array, "batch vocab"],
    target: Float[Array, "batch"],
    limited: Bool[Array, "batch"],
) -> UInt32[Array, "batch 1"]:
    """The largest threshold such that the weights at or above it sum to `target` or more, else 0.

    Rows that are not `limited` have a target out of reach. A batch of such rows costs nothing.
    """

    def lower_bit(i: Int[Array, ""], threshold: UInt32[Array, "batch 1"]) -> UInt32[Array, "batch 1"]:
        candidate = threshold | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        reached = jnp.sum(jnp.where(order >= candidate, weights, 0), axis=-1, keepdims=True)
        return jnp.where(reached >= target[:, None], candidate, threshold)

    nothing = jnp.zeros((order.shape[0], 1), jnp.uint32)
    return jax.lax.cond(limited.any(), lambda: jax.lax.fori_loop(0, 32, lower_bit, nothing), lambda: nothing)
