"""What one chunk of tokens does to the state, as matrix products.

Symbols, for one value head and a chunk of C tokens entered with state S: G_i is the sum of the log decays up to and
including token i, Gamma_ij = exp(G_i - G_j) for j <= i (0 otherwise), and

    L  = strictly lower part of beta_i (k_i . k_j) Gamma_ij,     X = (I + L)^-1
    v' = X (beta (v - exp(G) k S))                               the corrections the tokens write
    o  = exp(G) q S + ((q k^T) * Gamma) v'
    S <- exp(G_C) S + (exp(G_C - G) k)^T v'

Products of queries and keys belong to the key head and are computed once for all its value heads.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from qwen35_jax.ops.gated_delta_rule.block_inverse import unit_lower_inverse

HIGHEST = jax.lax.Precision.HIGHEST


class Chunk(NamedTuple):
    """Inputs of one chunk; `*chunks` stands for any leading axes (batch, or chunk and batch)."""

    q: Float[Array, "*chunks key_heads size key_dim"]
    k: Float[Array, "*chunks key_heads size key_dim"]
    v: Float[Array, "*chunks key_heads group size value_dim"]
    beta: Float[Array, "*chunks key_heads group size"]
    total: Float[Array, "*chunks key_heads group size"]
    """G, and what float rounding took from it (`residue`): differences of G stay exact however large G is."""
    residue: Float[Array, "*chunks key_heads group size"]
    same_segment: Bool[Array, "*chunks size size"] | None
    sees_state: Bool[Array, "*chunks size"] | None
    """Tokens that still belong to the segment of the state the chunk is entered with."""


class ChunkTerms(NamedTuple):
    """Everything of a chunk that does not depend on the state."""

    inverse: Float[Array, "*chunks key_heads group size size"]
    attention: Float[Array, "*chunks key_heads group size size"]
    from_state: Float[Array, "*chunks key_heads group size"]
    """exp(G_i), 0 for tokens that do not see the state."""
    to_state: Float[Array, "*chunks key_heads group size"]
    """exp(G_C - G_i), 0 for tokens whose segment ends within the chunk."""


def compensated_cumsum(
    x: Float[Array, "*batch size"],
) -> tuple[Float[Array, "*batch size"], Float[Array, "*batch size"]]:
    """Cumulative sum over the last axis as `(sum, residue)`, whose exact sum carries twice the digits.

    A decay between two late tokens is exp of a difference of two sums; where an early token decayed by exp(-2000), a
    plain float32 difference would be wrong by 1e-4. Source: Knuth's two-sum, TAOCP 2, 4.2.2, theorem B.
    """

    def add(left, right):
        (a, a_residue), (b, b_residue) = left, right
        total = a + b
        b_part = total - a
        error = (a - (total - b_part)) + (b - b_part)
        return total, a_residue + b_residue + error

    return jax.lax.associative_scan(add, (x, jnp.zeros_like(x)), axis=-1)


def _masked_exp(exponent, mask):
    """exp where `mask`, else 0; masked before exp, so that no overflow reaches the value or the gradient."""
    return jnp.where(mask, jnp.exp(jnp.where(mask, exponent, 0)), 0)


def chunk_terms(chunk: Chunk) -> ChunkTerms:
    """Decays, the inverse and the attention matrix of a chunk."""
    size = chunk.q.shape[-2]
    causal = jnp.tril(jnp.ones((size, size), bool))
    difference = (chunk.total[..., :, None] - chunk.total[..., None, :]) + (
        chunk.residue[..., :, None] - chunk.residue[..., None, :]
    )
    if chunk.same_segment is not None:
        causal = causal & chunk.same_segment[..., None, None, :, :]
    decay = _masked_exp(difference, causal)

    key_key = jnp.einsum("...kid,...kjd->...kij", chunk.k, chunk.k, precision=HIGHEST)[..., None, :, :]
    query_key = jnp.einsum("...kid,...kjd->...kij", chunk.q, chunk.k, precision=HIGHEST)[..., None, :, :]
    inverse = unit_lower_inverse(jnp.tril(chunk.beta[..., None] * key_key * decay, -1))

    if chunk.sees_state is None:
        from_state = jnp.exp(chunk.total)
    else:
        from_state = _masked_exp(chunk.total, chunk.sees_state[..., None, None, :])
    return ChunkTerms(inverse, query_key * decay, from_state, decay[..., -1, :])


def advance(
    state: Float[Array, "*chunks key_heads group key_dim value_dim"], chunk: Chunk, terms: ChunkTerms
) -> tuple[
    Float[Array, "*chunks key_heads group key_dim value_dim"],
    Float[Array, "*chunks key_heads group size value_dim"],
]:
    """Moves the state over the chunk: returns `(new state, outputs)`."""
    recalled = jnp.einsum("...kid,...krde->...krie", chunk.k, state, precision=HIGHEST)
    read = jnp.einsum("...kid,...krde->...krie", chunk.q, state, precision=HIGHEST)
    wanted = chunk.beta[..., None] * (chunk.v - terms.from_state[..., None] * recalled)
    corrections = jnp.matmul(terms.inverse, wanted, precision=HIGHEST)
    outputs = terms.from_state[..., None] * read + jnp.matmul(
        terms.attention, corrections, precision=HIGHEST
    )
    written = jnp.einsum(
        "...kid,...krie->...krde", chunk.k, terms.to_state[..., None] * corrections, precision=HIGHEST
    )
    return terms.from_state[..., -1, None, None] * state + written, outputs


def split(
    q: Float[Array, "batch time key_heads key_dim"],
    k: Float[Array, "batch time key_heads key_dim"],
    v: Float[Array, "batch time key_heads group value_dim"],
    log_decay: Float[Array, "batch time key_heads group"],
    beta: Float[Array, "batch time key_heads group"],
    segments: Int[Array, "batch time"] | None,
    size: int,
) -> Chunk:
    """Cuts the time axis into chunks of `size` tokens (the last one filled with no-ops), chunk axis first.

    `segments` counts the segments of a row from 0; the state at hand belongs to segment 0.
    """
    fill = -q.shape[1] % size

    def cut(x, heads, mode="constant"):
        x = jnp.pad(x, ((0, 0), (0, fill)) + ((0, 0),) * (x.ndim - 2), mode=mode)
        x = x.reshape(x.shape[0], -1, size, *x.shape[2:]).swapaxes(0, 1)
        return jnp.moveaxis(x, 2, 2 + heads)  # [chunk batch size *heads ...] -> [chunk batch *heads size ...]

    total, residue = compensated_cumsum(cut(log_decay, 2))
    same_segment = sees_state = None
    if segments is not None:
        segments = cut(segments, 0, mode="edge")
        before = jnp.concatenate([jnp.zeros_like(segments[:1, :, -1]), segments[:-1, :, -1]])
        same_segment = segments[..., :, None] == segments[..., None, :]
        sees_state = segments == before[..., None]
    return Chunk(cut(q, 1), cut(k, 1), cut(v, 2), cut(beta, 2), total, residue, same_segment, sees_state)


def join(
    outputs: Float[Array, "chunk batch key_heads group size value_dim"], time: int
) -> Float[Array, "batch time key_heads group value_dim"]:
    """The chunks' outputs as one time axis, without the filling."""
    outputs = jnp.moveaxis(outputs.swapaxes(0, 1), 4, 2)
    return outputs.reshape(outputs.shape[0], -1, *outputs.shape[3:])[:, :time]
