"""Causal attention with grouped key/value heads, over new tokens and a cache of earlier ones.

Letters: b batch, t query, s key, g key/value head, r query head within its group, d head_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from qwen35_jax.ops.segments import segment_index

QUERY_BLOCK = 256
PAST_BLOCK = 512
MAX_KEY_LENGTHS = 8


class _Partial(NamedTuple):
    """Softmax over some of a query's keys, not yet divided: sums of exp(score - peak), with and without the values."""

    numerator: Float[Array, "b g r t d"]
    denominator: Float[Array, "b g r t"]
    peak: Float[Array, "b g r t"]


def attention(
    q: Float[Array, "batch time heads head_dim"],
    k: Float[Array, "batch time kv_heads head_dim"],
    v: Float[Array, "batch time kv_heads head_dim"],
    *,
    segment_ids: Int[Array, "batch time"] | None = None,
    past_k: Float[Array, "batch capacity kv_heads head_dim"] | None = None,
    past_v: Float[Array, "batch capacity kv_heads head_dim"] | None = None,
    past_lengths: Int[Array, "batch"] | None = None,
) -> Float[Array, "batch time heads head_dim"]:
    """softmax(q k^T / sqrt(head_dim)) v, causal within each document.

    Query head h reads key/value head h // (heads / kv_heads). A token sees itself and the earlier new tokens of its segment;
    tokens of a row's first segment also see that row's past slots j < past_lengths.
    """
    batch, time, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    if heads % kv_heads:
        raise ValueError(f"q: {heads} heads, expected a multiple of the {kv_heads} heads of k and v")
    grouped = q.reshape(batch, time, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4)
    if segment_ids is None:
        index = None
    else:
        real = segment_ids != 0
        k, v = (jnp.where(real[:, :, None, None], x, 0) for x in (k, v))
        # Padding carries an index that no real token has.
        index = jnp.where(real, segment_index(segment_ids), -1)
    part = _new_tokens(grouped, k, v, index)
    if past_k is not None:
        assert past_v is not None and past_lengths is not None
        sees_past = jnp.ones((batch, time), bool) if index is None else index == 0
        part = _merge(part, _past_tokens(grouped, past_k, past_v, past_lengths, sees_past))
    denominator = jnp.where(part.denominator == 0, 1, part.denominator)
    out = part.numerator / denominator[..., None]
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, time, heads, head_dim).astype(q.dtype)


def _new_tokens(
    q: Float[Array, "b g r t d"],
    k: Float[Array, "b t g d"],
    v: Float[Array, "b t g d"],
    index: Int[Array, "b t"] | None,
) -> _Partial:
    time = q.shape[3]
    block = min(time, QUERY_BLOCK)
    blocks = -(-time // block)
    if blocks * block != time:
        extra = blocks * block - time
        q = jnp.pad(q, ((0, 0),) * 3 + ((0, extra), (0, 0)))
        k, v = (jnp.pad(x, ((0, 0), (0, extra), (0, 0), (0, 0))) for x in (k, v))
        if index is not None:
            index = jnp.pad(index, ((0, 0), (0, extra)), constant_values=-1)

    @jax.checkpoint
    def attend_block(start, q, k, v, index):
        rows = start + jnp.arange(block)
        mask = (rows[:, None] >= jnp.arange(k.shape[1]))[None]
        if index is not None:
            query_index = lax.dynamic_slice_in_dim(index, start, block, 1)
            mask &= (query_index[:, :, None] == index[:, None, : k.shape[1]]) & (query_index >= 0)[:, :, None]
        return _attend(q, k, v, mask)

    per_group = -(-blocks // MAX_KEY_LENGTHS)
    parts = []
    for first in range(0, blocks, per_group):
        last = min(first + per_group, blocks)
        keys, values = k[:, : last * block], v[:, : last * block]
        if last - first == 1:
            parts.append(attend_block(first * block, q[:, :, :, first * block : last * block], keys, values, index))
            continue
        queries = q[:, :, :, first * block : last * block]
        queries = jnp.moveaxis(queries.reshape(*q.shape[:3], last - first, block, q.shape[4]), 3, 0)
        stacked = lax.map(
            lambda xs, keys=keys, values=values: attend_block(xs[0], xs[1], keys, values, index),
            (jnp.arange(first, last) * block, queries),
        )
        parts.append(
            jax.tree.map(lambda x: jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], -1, *x.shape[5:]), stacked)
        )
    return jax.tree.map(lambda *xs: jnp.concatenate(xs, axis=3)[:, :, :, :time], *parts)


def _past_tokens(
    q: Float[Array, "b g r t d"],
    past_k: Float[Array, "b s g d"],
    past_v: Float[Array, "b s g d"],
    past_lengths: Int[Array, "b"],
    sees_past: Bool[Array, "b t"],
) -> _Partial:
    capacity = past_k.shape[1]
    block = min(PAST_BLOCK, capacity)
    wide = jnp.promote_types(q.dtype, jnp.float32)

    def add_block(i, part):
        start = jnp.minimum(i * block, capacity - block)
        slots = start + jnp.arange(block)
        filled = (slots >= i * block) & (slots < past_lengths[:, None])
        k, v = (
            jnp.where(filled[:, :, None, None], lax.dynamic_slice_in_dim(x, start, block, 1), 0) for x in (past_k, past_v)
        )
        return _merge(part, _attend(q, k, v, sees_past[:, :, None] & filled[:, None, :]))

    nothing = _Partial(jnp.zeros(q.shape, wide), jnp.zeros(q.shape[:-1], wide), jnp.full(q.shape[:-1], -jnp.inf, wide))
    return lax.fori_loop(0, -(-jnp.max(past_lengths) // block), add_block, nothing)


def _attend(
    q: Float[Array, "b g r t d"], k: Float[Array, "b s g d"], v: Float[Array, "b s g d"], mask: Bool[Array, "#b t s"]
) -> _Partial:
    wide = jnp.promote_types(q.dtype, jnp.float32)
    k, v = k.astype(q.dtype), v.astype(q.dtype)
    scores = jnp.einsum("bgrtd,bsgd->bgrts", q, k, preferred_element_type=wide) * q.shape[-1] ** -0.5
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    peak = lax.stop_gradient(jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - jnp.where(peak == -jnp.inf, 0, peak)[..., None])
    numerator = jnp.einsum("bgrts,bsgd->bgrtd", weights.astype(q.dtype), v, preferred_element_type=wide)
    return _Partial(numerator, jnp.sum(weights, axis=-1), peak)


def _merge(one: _Partial, other: _Partial) -> _Partial:
    peak = jnp.maximum(one.peak, other.peak)
    shift = jnp.where(peak == -jnp.inf, 0, peak)
    a, b = jnp.exp(one.peak - shift), jnp.exp(other.peak - shift)
    return _Partial(
        one.numerator * a[..., None] + other.numerator * b[..., None],
        one.denominator * a + other.denominator * b,
        peak,
    )
