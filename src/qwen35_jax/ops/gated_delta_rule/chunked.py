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

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qwen35_jax.ops.gated_delta_rule.chunk import Chunk, advance, advance_gradient, chunk_terms, join, split
from qwen35_jax.ops.gated_delta_rule.grouped import GroupedInputs, GroupedOutputs, GroupedState

ChunkOutputs = Float[Array, "batch chunk size key_heads group value_dim"]
StatesBefore = Float[Array, "chunk batch key_heads key_dim values"]


def chunked(
    inputs: GroupedInputs,
    state: GroupedState,
    segments: Int[Array, "batch time"] | None,
    chunk_size: int,
) -> tuple[GroupedOutputs, GroupedState]:
    """Walks the chunks; `segments` counts the segments of a row from 0, where `state` belongs to segment 0."""
    outputs, state = _walk(split(inputs, segments, chunk_size), state)
    return join(outputs, inputs.q.shape[1]), state


def _at(tree: Any, index: Int[Array, ""]) -> Any:
    """Chunk number `index` of arrays [batch chunk ...]."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False), tree)


def _put(tree: Any, update: Any, index: Int[Array, ""]) -> Any:
    """The arrays of `tree` with chunk number `index` replaced."""
    return jax.tree.map(
        lambda x, part: jax.lax.dynamic_update_index_in_dim(x, part, index, axis=1), tree, update
    )


def _blank(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Zeros to write into. Selecting costs nothing, and lets them vary over the mesh axes of `x` in `shard_map`."""
    return jnp.where(False, x, jnp.zeros_like(x))


def _forward(
    chunks: Chunk, state: GroupedState, *, keep_states: bool
) -> tuple[tuple[ChunkOutputs, GroupedState], StatesBefore | None]:
    def body(carry, index):
        state, outputs = carry
        after, output = advance(state, chunk_terms(_at(chunks, index)))
        return (after, _put(outputs, output, index)), state if keep_states else None

    (state, outputs), states = jax.lax.scan(body, (state, _blank(chunks.v)), jnp.arange(chunks.v.shape[1]))
    return (outputs, state), states


@jax.custom_vjp
def _walk(chunks: Chunk, state: GroupedState) -> tuple[ChunkOutputs, GroupedState]:
    return _forward(chunks, state, keep_states=False)[0]


def _walk_forward(
    chunks: Chunk, state: GroupedState
) -> tuple[tuple[ChunkOutputs, GroupedState], tuple[Chunk, StatesBefore | None]]:
    results, states = _forward(chunks, state, keep_states=True)
    return results, (chunks, states)


def _walk_backward(
    kept: tuple[Chunk, StatesBefore], cotangents: tuple[ChunkOutputs, GroupedState]
) -> tuple[Chunk, GroupedState]:
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
