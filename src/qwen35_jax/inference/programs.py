"""The compiled programs of generation: prefill of a chunk, the first draw, and decode with its draw.

They are all there is: a generation runs `prefill_chunk` in one of a few padded lengths, `first_token` once,
and then `next_token` for every token. Sampling settings, stop ids and limits are arrays, so none of them
compiles anything anew.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from qwen35_jax.cache import Cache
from qwen35_jax.inference.placement import Placement
from qwen35_jax.inference.sampling import Sampling, draw, penalize
from qwen35_jax.model import Parameters, decode_step, prefill


class Rows(NamedTuple):
    """Where each row of a batch stands.

    Attributes:
        token: the last token drawn.
        step: tokens drawn so far.
        active: false once a row has stopped; it then emits `Limits.pad_id` and its cache is frozen.
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
        vocabulary_size: ids from here on are never drawn: rows of the embedding without a token.
        pad_id: emitted by rows that have stopped.
    """

    stop_ids: Int[Array, "batch stops"]
    min_new_tokens: Int[Array, "batch"]
    vocabulary_size: Int[Array, ""]
    pad_id: Int[Array, ""]


class Emission(NamedTuple):
    """What a step gives the host.

    Attributes:
        token: the drawn token, `pad_id` in rows that had stopped before.
        emitted: whether the row was active.
        stopped: whether the token is a stop id.
        finite: whether the logits held neither NaN nor infinity.
    """

    token: Int[Array, "batch"]
    emitted: Bool[Array, "batch"]
    stopped: Bool[Array, "batch"]
    finite: Bool[Array, "batch"]


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnames=("cache", "logits"))
def prefill_chunk(
    graphdef: nnx.GraphDef,
    placement: Placement,
    parameters: Parameters,
    cache: Cache,
    logits: Float[Array, "batch vocab"],
    tokens: Int[Array, "batch time"],
    segment_ids: Int[Array, "batch time"],
) -> tuple[Float[Array, "batch vocab"], Cache]:
    """Consumes the next piece of every prompt.

    Args:
        placement: that of the arguments, and so of the results.
        logits: of the pieces before; kept for rows that have no token left in this piece.
        segment_ids: 1 for tokens, 0 for padding.
    """
    latest, cache = prefill(graphdef, parameters, tokens, cache, segment_ids=segment_ids)
    has_tokens = (segment_ids > 0).any(axis=1)
    return placement.keep((jnp.where(has_tokens[:, None], latest, logits), cache))


@functools.partial(jax.jit, static_argnums=0)
def first_token(
    placement: Placement,
    logits: Float[Array, "batch vocab"],
    rows: Rows,
    sampling: Sampling,
    limits: Limits,
) -> tuple[Rows, Emission]:
    """Draws the first token of every answer from the prompt's logits."""
    return placement.keep(_advance(logits, rows, sampling, limits))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnames="cache")
def next_token(
    graphdef: nnx.GraphDef,
    placement: Placement,
    parameters: Parameters,
    cache: Cache,
    rows: Rows,
    keep: Bool[Array, "batch"],
    sampling: Sampling,
    limits: Limits,
) -> tuple[Cache, Rows, Emission]:
    """Consumes the token drawn last and draws the next one, in one dispatch.

    Args:
        keep: false ends a row from outside, for its length or a stop string.
    """
    rows = rows._replace(active=rows.active & keep)
    logits, cache = decode_step(graphdef, parameters, rows.token, cache, active=rows.active)
    rows, emission = _advance(logits, rows, sampling, limits)
    return placement.keep((cache, rows, emission))


def _advance(
    logits: Float[Array, "batch vocab"], rows: Rows, sampling: Sampling, limits: Limits
) -> tuple[Rows, Emission]:
    finite = jnp.isfinite(logits).all(axis=-1)
    logits = penalize(logits, sampling, seen=rows.seen, generated=rows.generated)
    logits = _forbid(logits, rows.step, limits)
    token = jnp.where(rows.active, draw(logits, sampling, rows.step), limits.pad_id)
    stopped = (token[:, None] == limits.stop_ids).any(axis=1) & rows.active
    drawn = rows.active[:, None] & (jnp.arange(logits.shape[-1]) == token[:, None])
    following = Rows(
        token=token,
        step=rows.step + rows.active,
        active=rows.active & ~stopped,
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
