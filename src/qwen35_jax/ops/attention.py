"""Causal attention with grouped key/value heads, over new tokens and a cache of earlier ones.

Letters: b batch, t query, s key, g key/value head, r query head within its group, d head_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from qwen35_jax.ops.moving import from_storage
from qwen35_jax.ops.precision import product_precision
from qwen35_jax.ops.segments import is_real, segment_index

QUERY_BLOCK = 128
"""Queries whose scores are held at a time. Scores take batch * heads * QUERY_BLOCK * time numbers."""

KEY_LENGTHS = 4
"""Blocks of queries are walked in at most so many groups. A group reads the keys up to its own end, so that
with many groups little is computed above the diagonal, while the program's size stays bounded."""

PAST_BLOCK = 512
"""Slots of the cache read at a time."""

FEW_ROWS = 32
"""Up to so many queries per key/value head, scores are laid out with the keys first (see `_attend`)."""


class _Partial(NamedTuple):
    """Softmax over some of each query's keys, not yet divided.

    With peak = max over s of score: numerator = sum of exp(score - peak) * value, denominator = sum of
    exp(score - peak). A query without keys has 0, 0 and -inf.
    """

    numerator: Float[Array, "b g r t d"]
    denominator: Float[Array, "b g r t"]
    peak: Float[Array, "b g r t"]


def attention(
    q: Float[Array, "batch time heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads head_dim"],
    *,
    segment_ids: Int[Array, "batch keys"] | None = None,
    past_k: Shaped[Array, "*layers rows capacity kv_heads head_dim"] | None = None,
    past_v: Shaped[Array, "*layers rows capacity kv_heads head_dim"] | None = None,
    past_lengths: Int[Array, "batch"] | None = None,
    layer: Int[Array, ""] | None = None,
    first_row: Int[Array, ""] | None = None,
    first_query: Int[Array, ""] | None = None,
) -> Float[Array, "batch time heads head_dim"]:
    """softmax(q k^T / sqrt(head_dim)) v, causal within each document.

    A token sees itself and the earlier new tokens of its segment; the tokens of a row's first segment also
    see that row's past slots j < past_lengths. Query head h reads key/value head h // (heads / kv_heads). A
    query with nothing to see (padding) gives zeros.

    Memory grows with time, not with its square: scores exist for one block of queries at a time, and the
    backward pass computes them again. The past is read in blocks up to the longest row, so unused capacity
    costs nothing; it is a loop of data-dependent length, through which JAX has no reverse-mode gradient
    (training passes no past).

    Masks act on scores, before the maximum and the exponential. Padding and unused slots may hold anything,
    NaN included. A NaN in a real token surfaces: in every query that sees it, and, from v, in other queries
    of its row as well.

    Args:
        q, k, v: new tokens, already normalised and rotated.
        segment_ids: 0 for padding, positive numbers for documents; None when every token is real and of one
            document.
        past_k, past_v: cache before this call's tokens were written, kept as `ops.moving.to_storage` gives it.
        past_lengths: filled slots of each row.
        layer: given, past_k and past_v have a leading axis of layers, of which this one is read. In a scan over
            layers, taking the layer out of the stack before the call would copy all its capacity.
        first_row: given, past_k and past_v hold more rows than the call, whose own begin at this one.
        first_query: given, the queries are those of a part of the sequence that begins at this token, and keys, values
            and segment_ids are those of the whole. Otherwise there are as many of one as of the other.

    Returns:
        Outputs in the dtype of `q`. Products accumulate in float32 (float64), where the softmax runs; its
        weights are rounded to the dtype of `q` for the product with the values.

    Raises:
        ValueError: shapes do not fit, or only some of past_k, past_v, past_lengths are given.

    Source: Vaswani et al., "Attention Is All You Need" (2017), section 3.2; merging of partial softmaxes:
    Milakov & Gimelshein, "Online normalizer calculation for softmax" (2018).
    """
    _check(q, k, v, segment_ids, past_k, past_v, past_lengths, layer, first_row, first_query)
    batch, time, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, time, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4)
    index = None
    if segment_ids is not None:
        real = is_real(segment_ids)
        index = jnp.where(real, segment_index(segment_ids), -1)
        # A weight of 0 does not silence a NaN, so what padding holds is removed, not only masked.
        asking = real if first_query is None else lax.dynamic_slice_in_dim(real, first_query, time, 1)
        grouped = jnp.where(asking[:, None, None, :, None], grouped, 0)
        k, v = (jnp.where(real[:, :, None, None], x, 0) for x in (k, v))

    softmax = _over_new_tokens(grouped, k.astype(q.dtype), v.astype(q.dtype), index, first_query)
    if past_k is not None and past_v is not None and past_lengths is not None:
        sees_past = jnp.ones((batch, time), bool) if index is None else index == 0
        if layer is None:
            past_k, past_v = past_k[None], past_v[None]
        corner = (jnp.int32(0) if layer is None else layer, jnp.int32(0) if first_row is None else first_row)
        softmax = _merge(softmax, _over_past(grouped, past_k, past_v, past_lengths, corner, sees_past))

    denominator = jnp.where(softmax.denominator == 0, 1, softmax.denominator)
    out = (softmax.numerator / denominator[..., None]).astype(q.dtype)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


def _over_new_tokens(
    q: Float[Array, "b g r t d"],
    k: Float[Array, "b s g d"],
    v: Float[Array, "b s g d"],
    index: Int[Array, "b s"] | None,
    first_query: Int[Array, ""] | None,
) -> _Partial:
    time = q.shape[3]
    block = min(time, QUERY_BLOCK)
    blocks = -(-time // block)
    fill = blocks * block - time
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, fill), (0, 0)))
    k, v = (jnp.pad(x, ((0, 0), (0, fill), (0, 0), (0, 0))) for x in (k, v))
    if index is not None:
        index = jnp.pad(index, ((0, 0), (0, fill)), constant_values=-1)

    @jax.checkpoint
    def attend_block(first_row, q, k, v, index):
        keys = k.shape[1]
        if first_query is not None:
            first_row = first_row + first_query
        mask = (first_row + jnp.arange(block)[:, None] >= jnp.arange(keys))[None]
        if index is not None:
            row_index = lax.dynamic_slice_in_dim(index, first_row, block, 1)[:, :, None]
            mask &= (row_index == index[:, None, :keys]) & (row_index >= 0)
        return _attend(q, k, v, mask)

    per_group = -(-blocks // KEY_LENGTHS)
    parts = []
    for first in range(0, blocks, per_group):
        last = min(first + per_group, blocks)
        queries = q[:, :, :, first * block : last * block]
        seen = last * block if first_query is None else k.shape[1]
        keys, values = k[:, :seen], v[:, :seen]
        if last - first == 1:
            parts.append(attend_block(first * block, queries, keys, values, index))
            continue
        stacked = queries.reshape(*q.shape[:3], last - first, block, q.shape[4])
        _, part = lax.scan(
            lambda _, xs, keys=keys, values=values: (None, attend_block(xs[0], xs[1], keys, values, index)),
            None,
            (jnp.arange(first, last) * block, jnp.moveaxis(stacked, 3, 0)),
        )
        parts.append(
            jax.tree.map(lambda x: jnp.moveaxis(x, 0, 3).reshape(*q.shape[:3], -1, *x.shape[5:]), part)
        )
    return jax.tree.map(lambda *blocks: jnp.concatenate(blocks, axis=3)[:, :, :, :time], *parts)


def _over_past(
    q: Float[Array, "b g r t d"],
    past_k: Shaped[Array, "layers rows capacity g d"],
    past_v: Shaped[Array, "layers rows capacity g d"],
    past_lengths: Int[Array, "b"],
    corner: tuple[Int[Array, ""], Int[Array, ""]],
    sees_past: Bool[Array, "b t"],
) -> _Partial:
    capacity = past_k.shape[2]
    block = min(PAST_BLOCK, capacity)

    def add_block(i, softmax):
        # The last block is moved back to end at the capacity; slots it shares with the one before count
        # there.
        start = jnp.minimum(i * block, capacity - block)
        slots = start + jnp.arange(block)
        filled = (slots >= i * block) & (slots < past_lengths[:, None])
        k, v = (_slots(x, corner, q.shape[0], start, block).astype(q.dtype) for x in (past_k, past_v))
        v = jnp.where(filled[:, :, None, None], v, 0)
        return _merge(softmax, _attend(q, k, v, sees_past[:, :, None] & filled[:, None, :]))

    wide = jnp.promote_types(q.dtype, jnp.float32)
    nothing = _Partial(
        jnp.zeros(q.shape, wide), jnp.zeros(q.shape[:-1], wide), jnp.full(q.shape[:-1], -jnp.inf, wide)
    )
    return lax.fori_loop(0, -(-jnp.max(past_lengths) // block), add_block, nothing)


def _slots(
    cache: Shaped[Array, "layers rows capacity g d"],
    corner: tuple[Int[Array, ""], Int[Array, ""]],
    batch: int,
    start: Int[Array, ""],
    size: int,
) -> Float[Array, "b size g d"]:
    """Slots start to start + size of `batch` rows of one layer, in a loop over `start`.

    XLA's CPU compiler slices bfloat16 as float32. Without the barrier, which ties the cache to the loop's
    counter, it would widen the whole cache before the loop, whatever its filled length. Elsewhere, and for bits, a
    barrier would only make the compiler copy the cache.
    """
    if cache.dtype in (jnp.bfloat16, jnp.float16):
        cache, start = lax.optimization_barrier((cache, start))
    layer, row = (index.astype(start.dtype) for index in corner)  # all of one type, also with 64-bit types on
    zero = jnp.zeros_like(start)
    sizes = (1, batch, size, *cache.shape[3:])
    return from_storage(lax.dynamic_slice(cache, (layer, row, start, zero, zero), sizes)[0])


def _attend(
    q: Float[Array, "b g r t d"],
    k: Float[Array, "b s g d"],
    v: Float[Array, "b s g d"],
    mask: Bool[Array, "#b t s"],
) -> _Partial:
    """Partial softmax of every query over the keys where `mask` is true.

    With few queries the time goes into reading k. The order "keys times queries" then lets XLA read k as it
    lies in memory; "queries times keys" makes its CPU compiler transpose k first, which is several times
    slower.
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)
    products = {"precision": product_precision(q.dtype), "preferred_element_type": wide}
    scale = q.shape[-1] ** -0.5
    if q.shape[2] * q.shape[3] <= FEW_ROWS:
        axis, equation = 2, "bgsrt,bsgd->bgrtd"
        scores = jnp.einsum("bsgd,bgrtd->bgsrt", k, q, **products)
        mask = mask.swapaxes(1, 2)[:, None, :, None, :]
    else:
        axis, equation = 4, "bgrts,bsgd->bgrtd"
        scores = jnp.einsum("bgrtd,bsgd->bgrts", q, k, **products)
        mask = mask[:, None, None]
    scores = jnp.where(mask, scores * scale, -jnp.inf)
    peak = lax.stop_gradient(jnp.max(scores, axis=axis, keepdims=True))
    weights = jnp.exp(scores - jnp.where(peak == -jnp.inf, 0, peak))
    numerator = jnp.einsum(equation, weights.astype(q.dtype), v, **products)
    return _Partial(numerator, jnp.sum(weights, axis=axis), jnp.squeeze(peak, axis))


def _merge(one: _Partial, other: _Partial) -> _Partial:
    """Partial softmax over the keys of both."""
    peak = jnp.maximum(one.peak, other.peak)
    shift = jnp.where(peak == -jnp.inf, 0, peak)
    one_factor, other_factor = jnp.exp(one.peak - shift), jnp.exp(other.peak - shift)
    return _Partial(
        one.numerator * one_factor[..., None] + other.numerator * other_factor[..., None],
        one.denominator * one_factor + other.denominator * other_factor,
        peak,
    )


def _check(
    q: Float[Array, "..."],
    k: Float[Array, "..."],
    v: Float[Array, "..."],
    segment_ids: Int[Array, "..."] | None,
    past_k: Shaped[Array, "..."] | None,
    past_v: Shaped[Array, "..."] | None,
    past_lengths: Int[Array, "..."] | None,
    layer: Int[Array, ""] | None,
    first_row: Int[Array, ""] | None,
    first_query: Int[Array, ""] | None,
) -> None:
    batch, time, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    if first_query is not None:
        time = k.shape[1]
    if heads % kv_heads:
        raise ValueError(f"q: {heads} heads, expected a multiple of the {kv_heads} heads of k")
    expected = {
        "k": (k, (batch, time, kv_heads, head_dim)),
        "v": (v, (batch, time, kv_heads, head_dim)),
        "segment_ids": (segment_ids, (batch, time)),
    }
    given = [x is not None for x in (past_k, past_v, past_lengths)]
    if any(given) and not all(given):
        raise ValueError(f"past_k, past_v, past_lengths: given {given}, expected all three or none")
    if past_k is not None:
        leading = () if layer is None else past_k.shape[:1]
        rows = batch if first_row is None else max(batch, past_k.shape[len(leading)])
        past_shape = (*leading, rows, past_k.shape[len(leading) + 1], kv_heads, head_dim)
        expected |= {"past_k": (past_k, past_shape), "past_v": (past_v, past_shape)}
        expected |= {"past_lengths": (past_lengths, (batch,))}
    for name, (array, shape) in expected.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{name}: shape {array.shape}, expected {shape}")
