"""The gated delta rule as a composition of affine maps, one per chunk.

A chunk takes the state S to A S + B. Maps compose, (A2, B2) after (A1, B1) = (A2 A1, A2 B1 + B2), and composition is
associative: chunks (or whole devices, each holding part of the sequence) can be reduced in a tree. Within one device
the walk of `chunked` is several times faster, since A is a key_dim x key_dim matrix per chunk and value head.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qwen35_jax.ops.gated_delta_rule.chunk import (
    ChunkTerms,
    advance,
    apart,
    chunk_terms,
    join,
    side_by_side,
    split,
)
from qwen35_jax.ops.gated_delta_rule.grouped import GroupedInputs, GroupedOutputs, GroupedState
from qwen35_jax.ops.gated_delta_rule.products import product


class StateMap(NamedTuple):
    """S -> `transition` S + `write`, for each value head."""

    transition: Float[Array, "*chunks key_heads group key_dim key_dim"]
    write: Float[Array, "*chunks key_heads group key_dim value_dim"]

    def __call__(
        self, state: Float[Array, "*chunks key_heads group key_dim value_dim"]
    ) -> Float[Array, "*chunks key_heads group key_dim value_dim"]:
        return product(self.transition, state) + self.write


def compose(first: StateMap, second: StateMap) -> StateMap:
    """The map that does `first`, then `second`."""
    return StateMap(product(second.transition, first.transition), second(first.write))


def chunk_map(terms: ChunkTerms) -> StateMap:
    """What the chunk does to any state it is entered with."""
    k = terms.k[..., None, :, :]
    writer = product(k.mT, terms.to_state[..., :, None] * terms.inverse * terms.beta[..., None, :])
    kept = terms.from_state[..., -1, None, None] * jnp.eye(k.shape[-1], dtype=k.dtype)
    transition = kept - product(writer * terms.from_state[..., None, :], k)
    return StateMap(transition, product(writer, terms.v))


def associative(
    inputs: GroupedInputs,
    state: GroupedState,
    segments: Int[Array, "batch time"] | None,
    chunk_size: int,
) -> tuple[GroupedOutputs, GroupedState]:
    """All chunks at once: their maps, composed in a tree, give the state before each chunk."""
    terms = chunk_terms(split(inputs, segments, chunk_size))
    maps = jax.lax.associative_scan(compose, chunk_map(terms), axis=1)
    after = side_by_side(maps(apart(state, inputs.v.shape[3])[:, None]))
    before = jnp.concatenate([state[:, None], after[:, :-1]], axis=1)
    _, outputs = advance(before, terms)
    return join(outputs, inputs.q.shape[1]), after[:, -1]
