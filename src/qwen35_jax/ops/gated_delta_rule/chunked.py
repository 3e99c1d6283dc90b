"""The gated delta rule chunk by chunk: the method for training and prefill.

Chunks are read from the inputs, and outputs and gradients written, in place, inside one loop: nothing is transposed
or stacked outside it. The backward pass keeps the inputs and the state before each chunk, and walks the chunks in
reverse, each recomputed and differentiated on its own. (Forward-mode differentiation is left to the other methods.)

Cost per chunk of C tokens and value head, in multiplications, with one value head per key head: forward
3 C key_dim value_dim + C^2 (2 key_dim + 2 value_dim), backward 8 C key_dim value_dim + C^2 (5 key_dim + 5 value_dim),
and about C^3 / 6 each for the inverse. For 4096 tokens, 16 heads of 128 and C = 64 that is 10.8 GFLOP forward and
39 GFLOP with the backward pass. On one CPU core where XLA's products of this size reach 90 GFLOP/s (0.12 s and 0.43 s),
0.19 s and 0.76 s were measured. Chunks of 32 cost the same there, chunks of 128 half as much again.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qwen35_jax.ops.gated_delta_rule.chunk import Chunk, advance, advance_gradient, chunk_terms, join, split


def chunked(
    q: Float[Array, "batch time key_heads key_dim"],
    k: Float[Array, "batch time key_heads key_dim"],
    v: Float[Array, "batch time key_heads group value_dim"],
    log_decay: Float[Array, "batch time key_heads group"],
    beta: Float[Array, "batch time key_heads group"],
    state: Float[Array, "batch key_heads key_dim values"],
    segments: Int[Array, "batch time"] | None,
    chunk_size: int,
) -> tuple[
    Float[Array, "batch time key_heads group value_dim"],
    Float[Array, "batch key_heads key_dim values"],
]:
    """Walks the chunks; `segments` counts the segments of a row from 0, where `state` belongs to segment 0."""
    chunks = split(q, k, v, log_decay, beta, segments, chunk_size)
    outputs, state = _walk(chunks, state)
    return join(outputs, q.shape[1]), state


def _at(tree, index):
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False), tree)


def _put(tree, update, index):
    return jax.tree.map(
        lambda x, part: jax.lax.dynamic_update_index_in_dim(x, part, index, axis=1), tree, update
    )


def _blank(x):
    """Zeros to write into. Selecting costs nothing, and lets them vary over the mesh axes of `x` in `shard_map`."""
    return jnp.where(False, x, jnp.zeros_like(x))


def _forward(chunks, state, *, keep_states):
    def body(carry, index):
        state, outputs = carry
        after, output = advance(state, chunk_terms(_at(chunks, index)))
        return (after, _put(outputs, output, index)), state if keep_states else None

    (state, outputs), states = jax.lax.scan(body, (state, _blank(chunks.v)), jnp.arange(chunks.v.shape[1]))
    return (outputs, state), states


@jax.custom_vjp
def _walk(chunks: Chunk, state):
    return _forward(chunks, state, keep_states=False)[0]


def _walk_forward(chunks, state):
    results, states = _forward(chunks, state, keep_states=True)
    return results, (chunks, states)


def _walk_backward(kept, cotangents):
    chunks, states = kept
    d_outputs, d_state = cotangents

    def body(carry, step):
        d_state, gradients = carry
        index, state = step
        terms = chunk_terms(_at(chunks, index))
        d_state, d_chunk = advance_gradient(state, terms, d_state, _at(d_outputs, index))
        return (d_state, _put(gradients, d_chunk, index)), None

    zeros = jax.tree.map(_blank, chunks._replace(segment=None, segment_before=None))
    steps = (jnp.arange(chunks.v.shape[1]), states)
    (d_state, gradients), _ = jax.lax.scan(body, (d_state, zeros), steps, reverse=True)
    return gradients, d_state


_walk.defvjp(_walk_forward, _walk_backward)
