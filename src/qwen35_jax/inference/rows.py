"""Where the rows of a batch stand, and how each of them draws its next token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from qwen35_jax.inference.sampling import Sampling, draw, penalize
from qwen35_jax.inference.settings import GenerationSettings
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
        generated: tokens in the answer.
    """

    token: Int[Array, "batch"]
    step: Int[Array, "batch"]
    active: Bool[Array, "batch"]
    seen: Bool[Array, "batch vocab"]
    generated: Bool[Array, "batch vocab"]


class Limits(NamedTuple):
    """What may be drawn, and when a row ends.

    Attributes:
        stop_ids: ids that end a row; -1 fills the array up to a fixed length.
        min_new_tokens: before this many tokens no stop id is drawn.
        max_new_tokens: a row ends with this many tokens.
        vocabulary_size: ids from here on are never drawn: rows of the embedding without a token.
        pad_id: emitted by rows that have ended.
    """

    stop_ids: Int[Array, "batch stops"]
    min_new_tokens: Int[Array, "batch"]
    max_new_tokens: Int[Array, "batch"]
    vocabulary_size: Int[Array, ""]
    pad_id: Int[Array, ""]


class Emission(NamedTuple):
    """What a draw gives the host.

    Attributes:
        token: the drawn token, `pad_id` in rows that had ended before.
        emitted: whether the row was active.
        stopped: whether the token is a stop id.
        finite: whether the logits held neither NaN nor infinity.
    """

    token: Int[Array, "*draws batch"]
    emitted: Bool[Array, "*draws batch"]
    stopped: Bool[Array, "*draws batch"]
    finite: Bool[Array, "*draws batch"]


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
        generated=jnp.zeros(seen.shape, bool),
    )


def drawable_vocabulary(vocab_size: int, tokenizer: Tokenizer | None) -> int:
    """`Limits.vocabulary_size`: of the rows of the embedding, those that the tokenizer has a token for."""
    return vocab_size if tokenizer is None else min(vocab_size, tokenizer.vocabulary_size)


def limits_of(
    settings: Sequence[GenerationSettings],
    stop_ids: Sequence[Sequence[int]],
    *,
    vocabulary_size: int,
    pad_id: int,
) -> Limits:
    """The limits of every row.

    Args:
        settings: of each row; `max_new_tokens` that is None is without limit.
        stop_ids: of each row.
        vocabulary_size: see `Limits`.
        pad_id: see `Limits`.
    """
    slots = max(1, -(-max(map(len, stop_ids)) // STOP_ID_SLOTS)) * STOP_ID_SLOTS
    padded = np.full((len(settings), slots), -1, np.int32)
    for row, ids in enumerate(stop_ids):
        padded[row, : len(ids)] = list(ids)
    most = [np.iinfo(np.int32).max if row.max_new_tokens is None else row.max_new_tokens for row in settings]
    return Limits(
        stop_ids=jnp.asarray(padded),
        min_new_tokens=jnp.asarray(np.array([row.min_new_tokens for row in settings], np.int32)),
        max_new_tokens=jnp.asarray(np.array(most, np.int32)),
        vocabulary_size=jnp.int32(vocabulary_size),
        pad_id=jnp.int32(pad_id),
    )


def empty_emissions(shape: tuple[int, ...], limits: Limits) -> Emission:
    """What steps that did not run give the host."""
    return Emission(
        token=jnp.full(shape, limits.pad_id, jnp.int32),
        emitted=jnp.zeros(shape, bool),
        stopped=jnp.zeros(shape, bool),
        finite=jnp.ones(shape, bool),
    )


def unstacked(emissions: Emission) -> Iterator[Emission]:
    """The emissions of a block's passes, one by one."""
    for step in range(emissions.token.shape[0]):
        yield Emission(*(field[step] for field in emissions))


def draw_next(
    logits: Float[Array, "batch vocab"], rows: Rows, sampling: Sampling, limits: Limits
) -> tuple[Rows, Emission]:
    """Draws a token for every active row, and ends rows that drew a stop id or reached their length."""
    finite = jnp.isfinite(logits).all(axis=-1)
    logits = penalize(logits, sampling, seen=rows.seen, generated=rows.generated)
    logits = _forbid(logits, rows.step, limits)
    token = jnp.where(rows.active, draw(logits, sampling, rows.step), limits.pad_id)
    stopped = (token[:, None] == limits.stop_ids).any(axis=1) & rows.active
    drawn = rows.active[:, None] & (jnp.arange(logits.shape[-1]) == token[:, None])
    step = rows.step + rows.active
    following = Rows(
        token=token,
        step=step,
        active=rows.active & ~stopped & (step < limits.max_new_tokens),
        seen=rows.seen | drawn,
        generated=rows.generated | drawn,
    )
    return following, Emission(token, rows.active, stopped, finite | ~rows.active)


def _forbid(
    logits: Float[Array, "batch vocab"], step: Int[Array, "batch"], limits: Limits
) -> Float[Array, "batch vocab"]:
    """Minus infinity where no token is, and at the stop ids while a row is too short to stop."""
    batch, vocab = logits.shape
    stop_ids = jnp.where(
        limits.stop_ids < 0, vocab, limits.stop_ids
    )  # the filler falls outside and is dropped
    too_short = (step < limits.min_new_tokens)[:, None]
    forbidden = jnp.broadcast_to(jnp.arange(vocab) >= limits.vocabulary_size, (batch, vocab))
    forbidden = forbidden.at[jnp.arange(batch)[:, None], stop_ids].max(too_short, mode="drop")
    return jnp.where(forbidden, -jnp.inf, logits)
