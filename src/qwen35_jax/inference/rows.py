"""Where the rows of a batch stand, and how each of them draws its next token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from qwen35_jax.inference.sampling import Sampling, draw, penalize
from qwen35_jax.inference.settings import MOST_LOGPROBS, GenerationSettings
from qwen35_jax.inference.tokenizer import Tokenizer

STOP_ID_SLOTS = 8
"""Stop ids are padded to a multiple of this, so that their number compiles nothing."""


class Rows(NamedTuple):
    """Where each row of a batch stands.

    Attributes:
        token: the last token drawn.
        step: tokens drawn so far.
        active: false once a row has ended; it then emits `Limits.pad_id` and its cache is frozen.
        seen: tokens in the prompt or the answer.
        counts: how often each token stands in the answer.
    """

    token: Int[Array, "batch"]
    step: Int[Array, "batch"]
    active: Bool[Array, "batch"]
    seen: Bool[Array, "batch vocab"]
    counts: Int[Array, "batch vocab"]


class Limits(NamedTuple):
    """What may be drawn, and when a row ends.

    Attributes:
        stop_ids: ids that end a row; -1 fills the array up to a fixed length.
        min_new_tokens: before this many tokens no stop id is drawn.
        max_new_tokens: a row ends with this many tokens.
        bias: added to the logits. Minus infinity where a token is never drawn: at rows of the embedding without one.
        pad_id: emitted by rows that have ended.
    """

    stop_ids: Int[Array, "batch stops"]
    min_new_tokens: Int[Array, "batch"]
    max_new_tokens: Int[Array, "batch"]
    bias: Float[Array, "batch vocab"]
    pad_id: Int[Array, ""]


class Allowed(NamedTuple):
    """What the grammars of some rows leave to be drawn next.

    Attributes:
        bits: token t may be drawn if bit t % 32 of word t // 32 is 1; see `Constraint`.
        constrained: rows that have a grammar. They draw one token at a time: the next needs other bits.
    """

    bits: UInt32[Array, "batch words"]
    constrained: Bool[Array, "batch"]


class Logprobs(NamedTuple):
    """Natural logarithms of the model's own probabilities; zeros in rows that do not ask for them.

    Attributes:
        drawn: of the token drawn.
        top: of the most likely tokens, most likely first.
        top_tokens: which ones these are.
    """

    drawn: Float[Array, "*draws batch"]
    top: Float[Array, "*draws batch most"]
    top_tokens: Int[Array, "*draws batch most"]


class Emission(NamedTuple):
    """What a draw gives the host.

    Attributes:
        token: the drawn token, `pad_id` in rows that had ended before.
        emitted: whether the row was active.
        stopped: whether the token is a stop id.
        finite: whether the logits held neither NaN nor infinity.
        logprobs: see there.
    """

    token: Int[Array, "*draws batch"]
    emitted: Bool[Array, "*draws batch"]
    stopped: Bool[Array, "*draws batch"]
    finite: Bool[Array, "*draws batch"]
    logprobs: Logprobs


def fresh_rows(
    prompts: Sequence[Sequence[int]], vocab_size: int, active: Sequence[bool] | np.ndarray
) -> Rows:
    """Rows that have drawn nothing yet.

    Args:
        prompts: token ids of each row; the repetition penalty counts them.
        vocab_size: of the model.
        active: rows that will draw.
    """
    seen = np.zeros((len(prompts), vocab_size), bool)
    for row, prompt in enumerate(prompts):
        seen[row, list(prompt)] = True
    return Rows(
        token=jnp.zeros(len(prompts), jnp.int32),
        step=jnp.zeros(len(prompts), jnp.int32),
        active=jnp.asarray(np.array(active, bool)),
        seen=jnp.asarray(seen),
        counts=jnp.zeros(seen.shape, jnp.int32),
    )


def drawable_vocabulary(vocab_size: int, tokenizer: Tokenizer | None) -> int:
    """Of the rows of the embedding, how many the tokenizer has a token for."""
    return vocab_size if tokenizer is None else min(vocab_size, tokenizer.vocabulary_size)


def limits_of(
    settings: Sequence[GenerationSettings],
    stop_ids: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    drawable: int,
    pad_id: int,
) -> Limits:
    """The limits of every row.

    Args:
        settings: of each row; `max_new_tokens` that is None is without limit.
        stop_ids: of each row.
        vocab_size: of the model.
        drawable: see `drawable_vocabulary`.
        pad_id: see `Limits`.
    """
    slots = max(1, -(-max(map(len, stop_ids)) // STOP_ID_SLOTS)) * STOP_ID_SLOTS
    padded = np.full((len(settings), slots), -1, np.int32)
    bias = np.zeros((len(settings), vocab_size), np.float32)
    bias[:, drawable:] = -np.inf
    for row, (wanted, ids) in enumerate(zip(settings, stop_ids, strict=True)):
        padded[row, : len(ids)] = list(ids)
        for token, value in wanted.logit_bias.items():
            bias[row, token] += value
    most = [np.iinfo(np.int32).max if row.max_new_tokens is None else row.max_new_tokens for row in settings]
    return Limits(
        stop_ids=jnp.asarray(padded),
        min_new_tokens=jnp.asarray(np.array([row.min_new_tokens for row in settings], np.int32)),
        max_new_tokens=jnp.asarray(np.array(most, np.int32)),
        bias=jnp.asarray(bias),
        pad_id=jnp.int32(pad_id),
    )


def empty_emissions(shape: tuple[int, ...], limits: Limits) -> Emission:
    """What steps that did not run give the host."""
    return Emission(
        token=jnp.full(shape, limits.pad_id, jnp.int32),
        emitted=jnp.zeros(shape, bool),
        stopped=jnp.zeros(shape, bool),
        finite=jnp.ones(shape, bool),
        logprobs=_no_logprobs(shape, limits.bias.shape[-1]),
    )


def part_of(emission: Emission, *index: int | slice) -> Emission:
    """One draw out of several, or one row's."""
    return jax.tree.map(lambda field: field[index], emission)


def draw_next(
    logits: Float[Array, "batch vocab"],
    rows: Rows,
    sampling: Sampling,
    limits: Limits,
    allowed: Allowed | None = None,
) -> tuple[Rows, Emission]:
    """Draws a token for every active row, and ends rows that drew a stop id or reached their length."""
    emission = draw_tokens(logits, rows, sampling, limits, allowed)
    return rows_after(rows, jax.tree.map(lambda field: field[None], emission), limits), emission


def draw_tokens(
    logits: Float[Array, "batch vocab"],
    rows: Rows,
    sampling: Sampling,
    limits: Limits,
    allowed: Allowed | None,
) -> Emission:
    """What every active row draws where it stands."""
    finite = jnp.isfinite(logits).all(axis=-1)
    wanted = penalize(logits + limits.bias.astype(logits.dtype), sampling, seen=rows.seen, counts=rows.counts)
    wanted = _forbid_short_answers(wanted, rows.step, limits)
    if allowed is not None:
        wanted = jnp.where(_unpacked(allowed.bits, wanted.shape[-1]), wanted, -jnp.inf)
    token = jnp.where(rows.active, draw(wanted, sampling, rows.step), limits.pad_id)
    stopped = (token[:, None] == limits.stop_ids).any(axis=1) & rows.active
    logprobs = _logprobs(logits, token, rows.active & sampling.tells_logprobs, limits)
    return Emission(token, rows.active, stopped, finite | ~rows.active, logprobs)


def rows_after(rows: Rows, emissions: Emission, limits: Limits) -> Rows:
    """The rows after the draws [position batch] that were emitted, which are the leading ones of each row."""
    emitted = emissions.emitted
    drawn = emitted.sum(axis=0, dtype=rows.step.dtype)
    last = jnp.take_along_axis(emissions.token, jnp.maximum(drawn - 1, 0)[None], axis=0)[0]
    step = rows.step + drawn
    row, seen = jnp.arange(drawn.shape[0]), jnp.where(emitted, emissions.token, rows.seen.shape[-1])
    return Rows(
        token=jnp.where(drawn > 0, last, rows.token),
        step=step,
        active=rows.active & ~emissions.stopped.any(axis=0) & (step < limits.max_new_tokens),
        seen=rows.seen.at[row, seen].set(True, mode="drop"),
        counts=rows.counts.at[row, seen].add(1, mode="drop"),
    )


def _forbid_short_answers(
    logits: Float[Array, "batch vocab"], step: Int[Array, "batch"], limits: Limits
) -> Float[Array, "batch vocab"]:
    """Minus infinity at the stop ids while a row is too short to stop."""
    batch, vocab = logits.shape
    too_short = (step < limits.min_new_tokens)[:, None] & (limits.stop_ids >= 0)
    forbidden = jnp.where(too_short, limits.stop_ids, vocab)  # the others fall outside and are dropped
    return logits.at[jnp.arange(batch)[:, None], forbidden].set(-jnp.inf, mode="drop")


def _unpacked(bits: UInt32[Array, "batch words"], vocab: int) -> Bool[Array, "batch vocab"]:
    token = jnp.arange(vocab, dtype=jnp.uint32)
    return (jnp.repeat(bits, 32, axis=1)[:, :vocab] >> (token % 32)) & 1 == 1


def _logprobs(
    logits: Float[Array, "batch vocab"],
    token: Int[Array, "batch"],
    told: Bool[Array, "batch"],
    limits: Limits,
) -> Logprobs:
    def computed() -> Logprobs:
        drawable = jnp.where(jnp.isneginf(limits.bias), -jnp.inf, logits.astype(jnp.float32))
        logprobs = jax.nn.log_softmax(drawable, axis=-1)
        top, top_tokens = jax.lax.top_k(logprobs, min(MOST_LOGPROBS, logits.shape[-1]))
        drawn = jnp.take_along_axis(logprobs, token[:, None], axis=1)[:, 0]
        return Logprobs(drawn, top, top_tokens)

    return jax.lax.cond(told.any(), computed, lambda: _no_logprobs(token.shape, logits.shape[-1]))


def _no_logprobs(shape: tuple[int, ...], vocab: int) -> Logprobs:
    most = (*shape, min(MOST_LOGPROBS, vocab))
    return Logprobs(jnp.zeros(shape, jnp.float32), jnp.zeros(most, jnp.float32), jnp.zeros(most, jnp.int32))
