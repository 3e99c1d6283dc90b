"""The gated delta rule chunk by chunk: the method for training and prefill."""

import jax
from jaxtyping import Array, Float, Int

from qwen35_jax.ops.gated_delta_rule.chunk import advance, chunk_terms, join, split


def chunked(
    q: Float[Array, "batch time key_heads key_dim"],
    k: Float[Array, "batch time key_heads key_dim"],
    v: Float[Array, "batch time key_heads group value_dim"],
    log_decay: Float[Array, "batch time key_heads group"],
    beta: Float[Array, "batch time key_heads group"],
    state: Float[Array, "batch key_heads group key_dim value_dim"],
    segments: Int[Array, "batch time"] | None,
    chunk_size: int,
) -> tuple[
    Float[Array, "batch time key_heads group value_dim"],
    Float[Array, "batch key_heads group key_dim value_dim"],
]:
    """Walks the chunks in one `lax.scan`; the backward pass keeps one state per chunk and recomputes the rest."""
    chunks = split(q, k, v, log_decay, beta, segments, chunk_size)

    @jax.checkpoint
    def body(state, chunk):
        return advance(state, chunk, chunk_terms(chunk))

    state, outputs = jax.lax.scan(body, state, chunks)
    return join(outputs, q.shape[1]), state
