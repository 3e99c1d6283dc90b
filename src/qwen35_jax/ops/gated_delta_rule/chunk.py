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

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qwen35_jax.ops.gated_delta_rule.block_inverse import unit_lower_inverse

HIGHEST = jax.lax.Precision.HIGHEST


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
    """Everything of a chunk that does not depend on the state, heads before tokens."""

    q: Float[Array, "*chunks key_heads size key_dim"]
    k: Float[Array, "*chunks key_heads size key_dim"]
    v: Float[Array, "*chunks key_heads size group value_dim"]
    beta: Float[Array, "*chunks key_heads group size"]
    inverse: Float[Array, "*chunks key_heads group size size"]
    attention: Float[Array, "*chunks key_heads group size size"]
    from_state: Float[Array, "*chunks key_heads group size"]
    """exp(G_i), 0 for tokens that do not see the state."""
    to_state: Float[Array, "*chunks key_heads group size"]
    """exp(G_C - G_i), 0 for tokens whose segment ends within the chunk."""


def split_cumsum(
    log_decay: Float[Array, "*batch size"],
) -> tuple[Float[Array, "*batch size"], Float[Array, "*batch size"]]:
    """Cumulative sum G over the tokens as `(coarse, fine)`, G = coarse + fine, where coarse is free of rounding.

    After an early token with log decay -2000, differences of a plain float32 sum are wrong by 1e-4, and so would be
    every decay between late tokens. Here each value is cut into a multiple of a power of two, so coarse that sums of
    these are exact, and a remainder so small that the rounding of its sums does not matter; differences are taken part by
    part. Log decays below -1000 count as -1000: exp is 0 for both, in float64 as well.
    """
    size, floor = log_decay.shape[-1], -1000
    log_decay = jnp.maximum(log_decay, floor)
    digits = jnp.finfo(log_decay.dtype).nmant + 1
    grid = 2.0 ** (math.ceil(math.log2(size * -floor)) - digits)
    coarse = jax.lax.stop_gradient(jnp.round(log_decay / grid) * grid)
    upper = jnp.triu(jnp.ones((size, size), log_decay.dtype))
    return (
        jnp.matmul(coarse, upper, precision=HIGHEST),
        jnp.matmul(log_decay - coarse, upper, precision=HIGHEST),
    )


def _masked_exp(exponent, mask):
    """exp where `mask`, else 0; masked before exp, so that no overflow reaches the value or the gradient."""
    return jnp.where(mask, jnp.exp(jnp.where(mask, exponent, 0)), 0)


def chunk_terms(chunk: Chunk) -> ChunkTerms:
    """Decays, the inverse and the attention matrix of a chunk."""
    q, k, v = chunk.q.swapaxes(-3, -2), chunk.k.swapaxes(-3, -2), jnp.moveaxis(chunk.v, -4, -3)
    log_decay, beta = jnp.moveaxis(chunk.log_decay, -3, -1), jnp.moveaxis(chunk.beta, -3, -1)

    coarse, fine = split_cumsum(log_decay)
    difference = (coarse[..., :, None] - coarse[..., None, :]) + (fine[..., :, None] - fine[..., None, :])
    causal = jnp.tril(jnp.ones(difference.shape[-2:], bool))
    if chunk.segment is None:
        decay = _masked_exp(difference, causal)
        from_state = jnp.exp(coarse + fine)
    else:
        together = chunk.segment[..., :, None] == chunk.segment[..., None, :]
        decay = _masked_exp(difference, (causal & together)[..., None, None, :, :])
        sees_state = chunk.segment == chunk.segment_before[..., None]
        from_state = _masked_exp(coarse + fine, sees_state[..., None, None, :])

    key_key = jnp.einsum("...kid,...kjd->...kij", k, k, precision=HIGHEST)[..., None, :, :]
    query_key = jnp.einsum("...kid,...kjd->...kij", q, k, precision=HIGHEST)[..., None, :, :]
    inverse = unit_lower_inverse(jnp.tril(beta[..., None] * key_key * decay, -1))
    return ChunkTerms(q, k, v, beta, inverse, query_key * decay, from_state, decay[..., -1, :])


def advance(
    state: Float[Array, "*chunks key_heads key_dim group value_dim"], terms: ChunkTerms
) -> tuple[
    Float[Array, "*chunks key_heads key_dim group value_dim"],
    Float[Array, "*chunks size key_heads group value_dim"],
]:
    """Moves the state over the chunk: returns `(new state, outputs)`.

    The value heads of a key head stand side by side in the state, so that one product serves them all.
    """
    q, k, v, beta, inverse, attention, from_state, to_state = terms

    def per_token(weight):  # [... key_heads group size] -> [... key_heads size group 1]
        return weight.swapaxes(-1, -2)[..., None]

    recalled = jnp.einsum("...kid,...kdre->...kire", k, state, precision=HIGHEST)
    read = jnp.einsum("...kid,...kdre->...kire", q, state, precision=HIGHEST)
    wanted = per_token(beta) * (v - per_token(from_state) * recalled)
    corrections = jnp.einsum("...krij,...kjre->...kire", inverse, wanted, precision=HIGHEST)
    attended = jnp.einsum("...krij,...kjre->...kire", attention, corrections, precision=HIGHEST)
    outputs = per_token(from_state) * read + attended
    written = jnp.einsum("...kid,...kire->...kdre", k, per_token(to_state) * corrections, precision=HIGHEST)
    state = from_state[..., None, :, -1:] * state + written
    return state, jnp.moveaxis(outputs, -3, -4)


def split(
    q: Float[Array, "batch time key_heads key_dim"],
    k: Float[Array, "batch time key_heads key_dim"],
    v: Float[Array, "batch time key_heads group value_dim"],
    log_decay: Float[Array, "batch time key_heads group"],
    beta: Float[Array, "batch time key_heads group"],
    segments: Int[Array, "batch time"] | None,
    size: int,
) -> Chunk:
    """Cuts the time axis into chunks of `size` tokens, the last one filled with no-ops: `*chunks` = batch chunk.

    `segments` counts the segments of a row from 0; the state at hand belongs to segment 0.
    """
    fill = -q.shape[1] % size

    def cut(x, mode="constant"):
        if fill:
            x = jnp.pad(x, ((0, 0), (0, fill)) + ((0, 0),) * (x.ndim - 2), mode=mode)
        return x.reshape(x.shape[0], -1, size, *x.shape[2:])

    segment = segment_before = None
    if segments is not None:
        segment = cut(segments, mode="edge")
        segment_before = jnp.pad(segment[:, :-1, -1], ((0, 0), (1, 0)))
    return Chunk(cut(q), cut(k), cut(v), cut(log_decay), cut(beta), segment, segment_before)


def join(
    outputs: Float[Array, "batch chunk size key_heads group value_dim"], time: int
) -> Float[Array, "batch time key_heads group value_dim"]:
    """The chunks' outputs as one time axis, without the filling."""
    return outputs.reshape(outputs.shape[0], -1, *outputs.shape[3:])[:, :time]
