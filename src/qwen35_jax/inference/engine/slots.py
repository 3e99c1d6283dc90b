"""The device's side of an engine: a fixed number of slots, each a row of one batch, and the programs that work on them.

A request takes a slot, its prompt is consumed there piece by piece while the other slots decode, and when it has ended
the next request starts from an empty row. Whatever arrives, the same few programs run: one per padded length of a
piece, one to empty a slot, one to draw a first token, and a few to decode.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int

from qwen35_jax.cache import AttentionCache, Cache, LayerCache
from qwen35_jax.inference import programs
from qwen35_jax.inference.placement import Placement
from qwen35_jax.inference.programs import Memory
from qwen35_jax.inference.rows import Allowed, Emission, Limits, Rows, fresh_rows, limits_of
from qwen35_jax.inference.runnable import RunnableModel
from qwen35_jax.inference.sampling import Sampling, stack_settings
from qwen35_jax.inference.settings import GenerationSettings
from qwen35_jax.inference.speculation import Speculation
from qwen35_jax.logical_axes import mesh_axes, shards
from qwen35_jax.model import Parameters

Tree = TypeVar("Tree")


class Slots(NamedTuple):
    """All slots. Every array has one row per slot."""

    memory: Memory
    rows: Rows
    sampling: Sampling
    limits: Limits


class Tenant(NamedTuple):
    """What a request brings into a slot: one row each."""

    rows: Rows
    sampling: Sampling
    limits: Limits


def empty_slots(
    model: RunnableModel,
    placement: Placement,
    *,
    slots: int,
    capacity: int,
    drawable: int,
    speculation: Speculation | None,
) -> Slots:
    """Slots in which nobody has been.

    Args:
        model: that will run in them.
        placement: of its parameters.
        slots: how many.
        capacity: tokens that each has room for.
        drawable: see `limits_of`.
        speculation: see `generate`.
    """
    text = model.config.text
    settings = [GenerationSettings()] * slots
    return Slots(
        programs.empty_memory(model, placement, batch=slots, capacity=capacity, speculation=speculation),
        *placement.put(
            (
                fresh_rows([()] * slots, text.vocab_size, active=[False] * slots),
                stack_settings(settings, [0] * slots),
                limits_of(
                    settings,
                    [()] * slots,
                    vocab_size=text.vocab_size,
                    drawable=drawable,
                    pad_id=text.pad_token_id or 0,
                ),
            )
        ),
    )


def row_of(placement: Placement, tree: Tree, slot: Int[Array, ""]) -> Tree:
    """One row of every array, as a batch of one; keys and values stay where they are. See `Cache.first_row`."""

    def cut(array: Array, axis: int) -> Array:
        return take_row(placement, array, slot, axis)

    def of_cache(cache: Cache) -> Cache:
        groups = _map_delta_nets(lambda layer: jax.tree.map(lambda x: cut(x, 1), layer), cache.groups)
        return dataclasses.replace(cache, groups=groups, lengths=cut(cache.lengths, 0), first_row=slot)

    return _map_caches(of_cache, lambda array: cut(array, 0), tree)


def with_keys_at_hand(placement: Placement, row: Tree) -> Tree:
    """What `row_of` gave, for the model to run on.

    Where rows are cut over a mesh, keys and values are taken out too: reading a few of another device's where they are
    would have every device fetch those of all rows, in every pass.
    """

    def of_cache(cache: Cache) -> Cache:
        slot = cache.first_row
        rows = [layer.key.shape[1] for layer in attention_layers(cache)]
        if slot is None or not rows or _mesh_that_cuts(placement, rows[0]) is None:
            return cache
        groups = _map_delta_nets(
            lambda layer: layer,
            cache.groups,
            attention=lambda layer: jax.tree.map(lambda x: take_row(placement, x, slot, 1), layer),
        )
        return dataclasses.replace(cache, groups=groups, first_row=None)

    return _map_caches(of_cache, lambda array: array, row)


def with_row(tree: Tree, row: Tree, slot: Int[Array, ""]) -> Tree:
    """The tree with one row of every array replaced by what `row_of` has become."""

    def put(array: Array, new: Array, axis: int) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(array, new.astype(array.dtype), slot, axis)

    def of_cache(cache: Cache, new: Cache) -> Cache:
        def put_layer(layer: LayerCache, new: LayerCache) -> LayerCache:
            return jax.tree.map(lambda x, y: put(x, y, 1), layer, new)

        in_place = new.first_row is not None
        groups = _map_delta_nets(
            put_layer,
            cache.groups,
            new.groups,
            attention=(lambda layer, new: new) if in_place else put_layer,
        )
        return dataclasses.replace(cache, groups=groups, lengths=put(cache.lengths, new.lengths, 0))

    return _map_caches(of_cache, lambda array, new: put(array, new, 0), tree, row)


def take_row(placement: Placement, array: Array, slot: Int[Array, ""], axis: int) -> Array:
    """One row of an array, as a batch of one.

    Where rows are cut over a mesh, the devices that have the row give it to the others. The compiler would let every
    device gather all rows first.
    """
    mesh = _mesh_that_cuts(placement, array.shape[axis])
    if mesh is None:
        return jax.lax.dynamic_slice_in_dim(array, slot, 1, axis)
    axes = mesh_axes(mesh, "batch")
    # A sum of which one part is not zero is exact in any type; narrow ones are not summed on every platform.
    wide = array.dtype
    if wide.itemsize < 4:
        wide = jnp.float32 if jnp.issubdtype(wide, jnp.floating) else jnp.int32

    def of_device(part: Array, number: Int[Array, "1"], slot: Int[Array, ""]) -> Array:
        rows = part.shape[axis]
        index = slot - rows * number[0]
        row = jax.lax.dynamic_slice_in_dim(part, jnp.clip(index, 0, rows - 1), 1, axis)
        here = (index >= 0) & (index < rows)
        return jax.lax.psum(jnp.where(here, row, jnp.zeros_like(row)).astype(wide), axes)

    row = jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=(PartitionSpec(*[None] * axis, axes), PartitionSpec(axes), PartitionSpec()),
        out_specs=PartitionSpec(),
        axis_names={*axes},  # how the other axes are cut stays with the compiler
    )(array, jnp.arange(shards(mesh, "batch")), slot)
    return row.astype(array.dtype)


def attention_layers(cache: Cache) -> list[AttentionCache]:
    """The layers that keep keys and values."""
    return [layer for group in cache.groups for layer in group if isinstance(layer, AttentionCache)]


def _mesh_that_cuts(placement: Placement, rows: int) -> Mesh | None:
    """The mesh over which so many rows are cut; None where every device has all of them."""
    parts = placement.filled_rows(1)
    if parts == 1 or rows % parts:
        return None
    assert isinstance(placement.whole, NamedSharding) and isinstance(placement.whole.mesh, Mesh)
    return placement.whole.mesh


def _emptied(memory: Memory, slot: Int[Array, ""]) -> Memory:
    """Zeros in one row of every array but keys and values: beyond the row's length nobody reads these."""

    def clear(array: Array, axis: int) -> Array:
        shape = (*array.shape[:axis], 1, *array.shape[axis + 1 :])
        return jax.lax.dynamic_update_slice_in_dim(array, jnp.zeros(shape, array.dtype), slot, axis)

    def of_cache(cache: Cache) -> Cache:
        groups = _map_delta_nets(
            lambda layer: jax.tree.map(lambda array: clear(array, 1), layer), cache.groups
        )
        return dataclasses.replace(cache, groups=groups, lengths=clear(cache.lengths, 0))

    return _map_caches(of_cache, lambda array: clear(array, 0), memory)


def _map_caches(
    of_cache: Callable[..., Cache], of_array: Callable[..., Array], tree: Tree, *others: Tree
) -> Tree:
    """Maps over caches as wholes, and over every other array that has rows."""

    def one(node: Any, *others: Any) -> Any:
        if isinstance(node, Cache):
            return of_cache(node, *others)
        return of_array(node, *others) if node.ndim else node

    return jax.tree.map(one, tree, *others, is_leaf=lambda node: isinstance(node, Cache))


def _map_delta_nets(
    function: Callable[..., LayerCache],
    groups: tuple[tuple[LayerCache, ...], ...],
    *others: tuple[tuple[LayerCache, ...], ...],
    attention: Callable[..., LayerCache] = lambda layer: layer,
) -> tuple[tuple[LayerCache, ...], ...]:
    """Maps over the layers of a cache by their kind."""

    def one(layer: LayerCache, *others: LayerCache) -> LayerCache:
        return (attention if isinstance(layer, AttentionCache) else function)(layer, *others)

    return tuple(tuple(map(one, *layers)) for layers in zip(groups, *others, strict=True))


@functools.partial(jax.jit, static_argnums=0, donate_argnames="slots")
def occupy(placement: Placement, slots: Slots, slot: Int[Array, ""], tenant: Tenant) -> Slots:
    """Empties a slot of all that its last tenant left, and writes down what the new one asks for."""
    settings = with_row(Tenant(slots.rows, slots.sampling, slots.limits), tenant, slot)
    return placement.keep(Slots(_emptied(slots.memory, slot), *settings))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnames="slots")
def prefill_slot(
    graphdef: nnx.GraphDef,
    placement: Placement,
    parameters: Parameters,
    slots: Slots,
    slot: Int[Array, ""],
    tokens: Int[Array, "1 time"],
    segment_ids: Int[Array, "1 time"],
) -> tuple[Slots, Int[Array, "1"]]:
    """Consumes the next piece of the prompt in one slot. Arguments as for `programs.prefill_chunk`.

    Returns:
        The slots, and how many tokens that slot has consumed.
    """
    one = with_keys_at_hand(placement, row_of(placement, slots.memory, slot))
    row = programs.prefill_chunk(graphdef, placement, parameters, one, tokens, segment_ids)
    return placement.keep(slots._replace(memory=with_row(slots.memory, row, slot))), row.cache.lengths


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnames="slots")
def start_slot(
    graphdef: nnx.GraphDef,
    placement: Placement,
    parameters: Parameters,
    slots: Slots,
    slot: Int[Array, ""],
    allowed: Allowed,
) -> tuple[Slots, Emission]:
    """Draws the first token after a slot's prompt. From here on the slot decodes.

    Args:
        allowed: of that slot, see `programs.decode_block`.

    Returns:
        The slots, and the draw [1].
    """
    one = with_keys_at_hand(placement, row_of(placement, slots, slot))
    rows = one.rows._replace(active=jnp.ones_like(one.rows.active))
    memory, rows, emission = programs.first_token(
        graphdef, placement, parameters, one.memory, rows, one.sampling, one.limits, allowed
    )
    slots = with_row(slots, one._replace(memory=memory, rows=rows), slot)
    return placement.keep(slots), emission


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnames="slots")
def decode_slots(
    graphdef: nnx.GraphDef,
    placement: Placement,
    parameters: Parameters,
    slots: Slots,
    keep: Bool[Array, "batch"],
    allowed: Allowed,
    *,
    steps: Int[Array, ""] | int,
) -> tuple[Slots, Emission]:
    """A block of decoding in all slots that decode. Arguments and results as for `programs.decode_block`."""
    memory, rows, emissions = programs.decode_block(
        graphdef,
        placement,
        parameters,
        slots.memory,
        slots.rows,
        keep,
        slots.sampling,
        slots.limits,
        allowed,
        steps=steps,
    )
    return slots._replace(memory=memory, rows=rows), emissions


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnames="slots")
def decode_slot(
    graphdef: nnx.GraphDef,
    placement: Placement,
    parameters: Parameters,
    slots: Slots,
    slot: Int[Array, ""],
    keep: Bool[Array, "1"],
    allowed: Allowed,
    *,
    steps: Int[Array, ""] | int,
) -> tuple[Slots, Emission]:
    """`decode_slots` for when only one slot decodes: the others cost nothing. Their emissions are left out."""
    one = with_keys_at_hand(placement, row_of(placement, slots, slot))
    memory, rows, emissions = programs.decode_block(
        graphdef,
        placement,
        parameters,
        one.memory,
        one.rows,
        keep,
        one.sampling,
        one.limits,
        allowed,
        steps=steps,
    )
    return placement.keep(with_row(slots, one._replace(memory=memory, rows=rows), slot)), emissions
