"""What one chunk of tokens does to the state, as matrix products.

Symbols, for one value head and a chunk of C tokens entered with state S: G_i is the sum of the log decays up to and
including token i, Gamma_ij = exp(G_i - G_j) for j <= i (0 otherwise), and

    L  = strictly lower part of beta_i (k_i . k_j) Gamma_ij,     X = (I + L)^-1
    v' = X (beta (v - exp(G) k S))                               the corrections the tokens write
    o  = exp(G) q S + ((q k^T) * Gamma) v'
    S <- exp(G_C) S + (exp(G_C - G) k)^T v'

Products of queries and keys belong to the key head and are computed once for all its value heads.
"""

import math
from typing import NamedTuple

import einops
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from qwen35_jax.ops.gated_delta_rule.block_inverse import unit_lower_inverse
from qwen35_jax.ops.gated_delta_rule.grouped import GroupedInputs, GroupedOutputs
from qwen35_jax.ops.gated_delta_rule.products import product, product_nt, product_tn, row_dots


class Chunk(NamedTuple):
    """Inputs of one chunk; `*chunks` stands for any leading axes (batch, or batch and chunk)."""

    q: Float[Array, "*chunks size key_heads key_dim"]
    k: Float[Array, "*chunks size key_heads key_dim"]
    v: Float[Array, "*chunks size key_heads group value_dim"]
    log_decay: Float[Array, "*chunks size key_heads group"]
    beta: Float[Array, "*chunks size key_heads group"]
    segment: Int[Array, "*chunks size"] | None
    segment_before: Int[Array, "*chunks"] | None
    """The segment that the state belongs to with which the chunk is entered."""


class ChunkTerms(NamedTuple):
    """Everything of a chunk that does not depend on the state, heads before tokens. Names: see the top of the file."""

    q: Float[Array, "*chunks key_heads size key_dim"]
    k: Float[Array, "*chunks key_heads size key_dim"]
    v: Float[Array, "*chunks key_heads group size value_dim"]
    beta: Float[Array, "*chunks key_heads group size"]
    query_key: Float[Array, "*chunks key_heads size size"]
    key_key: Float[Array, "*chunks key_heads size size"]
    decay: Float[Array, "*chunks key_heads group size size"]
    """Gamma, 0 between segments."""
    from_state: Float[Array, "*chunks key_heads group size"]
    """exp(G_i), 0 for tokens that do not see the state."""
    inverse: Float[Array, "*chunks key_heads group size size"]
    """X."""

    @property
    def to_state(self) -> Float[Array, "*chunks key_heads group size"]:
        """exp(G_C - G_i), 0 for tokens whose segment ends within the chunk."""
        return self.decay[..., -1, :]

    @property
    def attention(self) -> Float[Array, "*chunks key_heads group size size"]:
        return self.query_key[..., None, :, :] * self.decay


def split_cumsum(
    log_decay: Float[Array, "*batch size"],
) -> tuple[Float[Array, "*batch size"], Float[Array, "*batch size"]]:
    """Cumulative sum G over the tokens as `(coarse, fine)`, G = coarse + fine, where coarse is free of rounding.

    After an early token with log decay -2000, differences of a plain float32 sum are wrong by 1e-4, and so would be
    every decay between late tokens. Here each value is cut into a multiple of a power of two, so coarse that sums of
    these are exact, and a remainder so small that the rounding of its sums does not matter; differences are taken
    part by part. Log decays below -1000 count as -1000: exp is 0 for both, in float64 as well.
    """
    size, floor = log_decay.shape[-1], -1000
    log_decay = jnp.maximum(log_decay, floor)
    digits = jnp.finfo(log_decay.dtype).nmant + 1
    grid = 2.0 ** (math.ceil(math.log2(size * -floor)) - digits)
    coarse = jax.lax.stop_gradient(jnp.round(log_decay / grid) * grid)
    upper = jnp.triu(jnp.ones((size, size), log_decay.dtype))
    return product(coarse, upper), product(log_decay - coarse, upper)


def _masked_exp(exponent: Float[Array, "*shape"], mask: Bool[Array, "*#shape"]) -> Float[Array, "*shape"]:
    """exp where `mask`, else 0; masked before exp, so that no overflow reaches the value or the gradient."""
    return jnp.where(mask, jnp.exp(jnp.where(mask, exponent, 0)), 0)


def chunk_terms(chunk: Chunk) -> ChunkTerms:
    """Decays, products of queries and keys, and the inverse of a chunk."""
    q, k, v = chunk.q.swapaxes(-3, -2), chunk.k.swapaxes(-3, -2), jnp.moveaxis(chunk.v, -4, -2)
    log_decay, beta = jnp.moveaxis(chunk.log_decay, -3, -1), jnp.moveaxis(chunk.beta, -3, -1)

    coarse, fine = split_cumsum(log_decay)
    difference = (coarse[..., :, None] - coarse[..., None, :]) + (fine[..., :, None] - fine[..., None, :])
    causal = jnp.tril(jnp.ones(difference.shape[-2:], bool))
    if chunk.segment is None or chunk.segment_before is None:
        decay = _masked_exp(difference, causal)
        from_state = jnp.exp(coarse + fine)
    else:
        together = chunk.segment[..., :, None] == chunk.segment[..., None, :]
        decay = _masked_exp(difference, (causal & together)[..., None, None, :, :])
        sees_state = chunk.segment == chunk.segment_before[..., None]
        from_state = _masked_exp(coarse + fine, sees_state[..., None, None, :])

    query_key, key_key = product_nt(q, k), product_nt(k, k)
    inverse = unit_lower_inverse(jnp.tril(beta[..., None] * key_key[..., None, :, :] * decay, -1))
    return ChunkTerms(q, k, v, beta, query_key, key_key, decay, from_state, inverse)


def side_by_side(
    x: Float[Array, "*chunks key_heads group size value_dim"],
) -> Float[Array, "*chunks key_heads size values"]:
    """The value heads of a key head beside each other, so that one product with q or k serves them all."""
    return einops.rearrange(x, "... g c v -> ... c (g v)")


def apart(
    x: Float[Array, "*chunks key_heads size values"], group: int
) -> Float[Array, "*chunks key_heads group size value_dim"]:
    """Undoes `side_by_side`."""
    return einops.rearrange(x, "... c (g v) -> ... g c v", g=group)


def advance(
    state: Float[Array, "*chunks key_heads key_dim values"], terms: ChunkTerms
) -> tuple[
    Float[Array, "*chunks key_heads key_dim values"],
    Float[Array, "*chunks size key_heads group value_dim"],
]:
    """Moves the state over the chunk: returns `(new state, outputs)`."""
    group = terms.v.shape[-3]
    from_state, to_state = terms.from_state[..., None], terms.to_state[..., None]
    recalled, read = apart(product(terms.k, state), group), apart(product(terms.q, state), group)
    corrections = product(terms.inverse, terms.beta[..., None] * (terms.v - from_state * recalled))
    outputs = from_state * read + product(terms.attention, corrections)
    written = product_tn(terms.k, side_by_side(to_state * corrections))
    return _fade(state, terms) + written, jnp.moveaxis(outputs, -2, -4)


def by_head(
    state: Float[Array, "*chunks key_heads key_dim values"], group: int
) -> Float[Array, "*chunks key_heads key_dim group value_dim"]:
    """The states of a key head's value heads, side by side in `values`, as an axis of their own."""
    return einops.rearrange(state, "... k (g v) -> ... k g v", g=group)


def _fade(
    state: Float[Array, "*chunks key_heads key_dim values"], terms: ChunkTerms
) -> Float[Array, "*chunks key_heads key_dim values"]:
    """exp(G_C) S, with S as in `advance`."""
    factor = terms.from_state[..., None, :, -1:]
    return (factor * by_head(state, factor.shape[-2])).reshape(state.shape)


def advance_gradient(
    state: Float[Array, "*chunks key_heads key_dim values"],
    terms: ChunkTerms,
    d_state: Float[Array, "*chunks key_heads key_dim values"],
    d_outputs: Float[Array, "*chunks size key_heads group value_dim"],
) -> tuple[Float[Array, "*chunks key_heads key_dim values"], Chunk]:
    """Gradient of `advance` and `chunk_terms` together, written out.

    Against automatic differentiation it saves the derivative of the inverse: with v' = X w, the gradient of L is
    -dw v'^T below the diagonal, one product instead of three.

    Args:
        state: the state the chunk was entered with.
        terms: of the chunk.
        d_state: gradient with respect to the state after the chunk.
        d_outputs: gradient with respect to the outputs.

    Returns:
        The gradients with respect to `state` and to the arrays of the `Chunk`.
    """
    q, k, v, _, query_key, key_key, decay, _, inverse = terms
    group = v.shape[-3]
    beta, from_state, to_state = (x[..., None] for x in (terms.beta, terms.from_state, terms.to_state))
    query_key, key_key = query_key[..., None, :, :], key_key[..., None, :, :]
    d_outputs = jnp.moveaxis(d_outputs, -4, -2)

    recalled, read = apart(product(k, state), group), apart(product(q, state), group)
    error = v - from_state * recalled
    corrections = product(inverse, beta * error)

    d_written = apart(product(k, d_state), group)
    d_corrections = product_tn(terms.attention, d_outputs) + to_state * d_written
    d_wanted = product_tn(inverse, d_corrections)
    d_attention = product_nt(d_outputs, corrections) * decay
    d_lower = -jnp.tril(product_nt(d_wanted, corrections), -1) * decay
    d_error = beta * d_wanted
    d_recalled, d_read = side_by_side(-from_state * d_error), side_by_side(from_state * d_outputs)
    written = side_by_side(to_state * corrections)

    d_query_key = jnp.sum(d_attention, -3)
    d_key_key = jnp.sum(beta * d_lower, -3)
    d_q = product(d_query_key, k) + product_nt(d_read, state)
    d_k = (
        product_tn(d_query_key, q)
        + product(d_key_key + d_key_key.mT, k)
        + product_nt(d_recalled, state)
        + product_nt(written, d_state)
    )
    d_beta = row_dots(d_wanted, error) + row_dots(d_lower, jnp.broadcast_to(key_key, d_lower.shape))

    d_difference = d_attention * query_key + beta * d_lower * key_key
    d_last = terms.to_state * row_dots(d_written, corrections)
    d_total = jnp.sum(d_difference, -1) - jnp.sum(d_difference, -2) - d_last
    d_total += terms.from_state * (row_dots(d_outputs, read) - row_dots(d_error, recalled))
    d_fade = jnp.sum(row_dots(by_head(d_state, group), by_head(state, group)), -2)
    d_total = d_total.at[..., -1].add(jnp.sum(d_last, -1) + terms.from_state[..., -1] * d_fade)
    size = d_total.shape[-1]
    d_log_decay = product(d_total, jnp.tril(jnp.ones((size, size), d_total.dtype)))

    d_before = _fade(d_state, terms) + product_tn(k, d_recalled) + product_tn(q, d_read)
    return d_before, Chunk(
        d_q.swapaxes(-3, -2),
        d_k.swapaxes(-3, -2),
        jnp.moveaxis(d_error, -2, -4),
        jnp.moveaxis(d_log_decay, -1, -3),
        jnp.moveaxis(d_beta, -1, -3),
        segment=None,
        segment_before=None,
    )


def split(inputs: GroupedInputs, segments: Int[Array, "batch time"] | None, size: int) -> Chunk:
    """Cuts the time axis into chunks of `size` tokens, the last one filled with no-ops: `*chunks` = batch chunk.

    `segments` counts the segments of a row from 0; the state at hand belongs to segment 0.
    """
    fill = -inputs.q.shape[1] % size

    def cut(x: Array, mode: str = "constant") -> Array:
        if fill:
            x = jnp.pad(x, ((0, 0), (0, fill)) + ((0, 0),) * (x.ndim - 2), mode=mode)
        return einops.rearrange(x, "b (n c) ... -> b n c ...", c=size)

    segment = segment_before = None
    if segments is not None:
        segment = cut(segments, mode="edge")
        segment_before = jnp.pad(segment[:, :-1, -1], ((0, 0), (1, 0)))
    q, k, v, log_decay, beta = map(cut, inputs)
    return Chunk(q, k, v, log_decay, beta, segment, segment_before)


def join(outputs: Float[Array, "batch chunk size key_heads group value_dim"], time: int) -> GroupedOutputs:
    """The chunks' outputs as one time axis, without the filling."""
    return einops.rearrange(outputs, "b n c ... -> b (n c) ...")[:, :time]
