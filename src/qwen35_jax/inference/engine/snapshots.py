"""Taking the memory of a slot apart into what a prefix cache keeps, and putting it together again."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qwen35_jax.cache import AttentionCache, Cache, DeltaNetCache, LayerCache
from qwen35_jax.inference.engine.prefix_cache import BLOCK
from qwen35_jax.inference.engine.slots import Slots, attention_layers, row_of, take_row, with_row
from qwen35_jax.inference.placement import Placement
from qwen35_jax.inference.programs import Memory


class Block(NamedTuple):
    """Keys and values of `BLOCK` tokens, as lists of the attention layers of a cache.

    Attributes:
        main: of the main model.
        head: of the multi-token-prediction head, which lags one token behind; empty without it.
    """

    main: list[AttentionCache]
    head: list[AttentionCache]


class Snapshot(NamedTuple):
    """What is left of the memory of a row, without keys, values and logits.

    Attributes:
        delta_nets: of all DeltaNet layers.
        lengths: tokens consumed, [1].
        head_hidden: `Draft.hidden`; None without a head.
    """

    delta_nets: list[DeltaNetCache]
    lengths: Int[Array, "1"]
    head_hidden: Float[Array, "1 embed"] | None


@functools.partial(jax.jit, static_argnums=0)
def read_block(placement: Placement, memory: Memory, slot: Int[Array, ""], start: Int[Array, ""]) -> Block:
    """Keys and values of the tokens from `start` on in one slot."""

    def read(cache: Cache, start: Int[Array, ""]) -> list[AttentionCache]:
        def cut(array: Array) -> Array:
            block = jax.lax.dynamic_slice_in_dim(array, start, BLOCK, axis=2)
            return take_row(placement, block, slot, axis=1)

        return [jax.tree.map(cut, layer) for layer in attention_layers(cache)]

    head = [] if memory.draft is None else read(memory.draft.cache, _head_start(start))
    return Block(read(memory.cache, start), head)


@functools.partial(jax.jit, static_argnums=0, donate_argnames="slots")
def write_block(
    placement: Placement, slots: Slots, slot: Int[Array, ""], start: Int[Array, ""], block: Block
) -> Slots:
    """Puts back what `read_block` gave. A chain of blocks is written from its first one on."""

    def write(cache: Cache, start: Int[Array, ""], layers: list[AttentionCache]) -> Cache:
        new = iter(layers)

        def put(array: Array, part: Array) -> Array:
            return jax.lax.dynamic_update_slice(array, part, (0, slot, start, 0, 0))

        groups = tuple(
            tuple(
                jax.tree.map(put, layer, next(new)) if isinstance(layer, AttentionCache) else layer
                for layer in group
            )
            for group in cache.groups
        )
        return dataclasses.replace(cache, groups=groups)

    memory = slots.memory
    draft = memory.draft
    if draft is not None:
        draft = dataclasses.replace(draft, cache=write(draft.cache, _head_start(start), block.head))
    memory = memory._replace(cache=write(memory.cache, start, block.main), draft=draft)
    return placement.keep(slots._replace(memory=memory))


@functools.partial(jax.jit, static_argnums=0)
def take_snapshot(placement: Placement, memory: Memory, slot: Int[Array, ""]) -> Snapshot:
    """What one slot remembers beside keys and values."""
    row = row_of(placement, memory, slot)
    delta_nets = [layer for group in row.cache.groups for layer in group if isinstance(layer, DeltaNetCache)]
    return Snapshot(delta_nets, row.cache.lengths, None if row.draft is None else row.draft.hidden)


@functools.partial(jax.jit, static_argnums=0, donate_argnames="slots")
def put_snapshot(placement: Placement, slots: Slots, slot: Int[Array, ""], snapshot: Snapshot) -> Slots:
    """Puts back what `take_snapshot` gave."""
    row = row_of(placement, slots.memory, slot)
    new = iter(snapshot.delta_nets)

    def layer_of(old: LayerCache) -> LayerCache:
        return next(new) if isinstance(old, DeltaNetCache) else old

    groups = tuple(tuple(layer_of(layer) for layer in group) for group in row.cache.groups)
    row = row._replace(cache=dataclasses.replace(row.cache, groups=groups, lengths=snapshot.lengths))
    if row.draft is not None and snapshot.head_hidden is not None:
        # The head may have seen one token more, drawn and not consumed. It is forgotten: the prompt has its own.
        head = dataclasses.replace(row.draft.cache, lengths=jnp.maximum(snapshot.lengths - 1, 0))
        row = row._replace(draft=dataclasses.replace(row.draft, cache=head, hidden=snapshot.head_hidden))
    return placement.keep(slots._replace(memory=with_row(slots.memory, row, slot)))


def _head_start(start: Int[Array, ""]) -> Int[Array, ""]:
    """Where the head's part of a block begins: what it remembers of a token stands one slot before the main model's.

    The first block has nothing before it; its last slot here is the first of the next block's.
    """
    return jnp.maximum(start - 1, 0)
