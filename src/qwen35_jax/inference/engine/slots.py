"""The device's side of an engine: a fixed number of slots, each a row of one batch, and the programs that work on them.

A request takes a slot, its prompt is consumed there piece by piece while the other slots decode, and when it has ended
the next request starts from an empty row. Whatever arrives, the same few programs run: one per padded length of a
piece, and one each to empty a slot, to draw a first token, and to decode.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Int

from qwen35_jax.cache import Cache
from qwen35_jax.inference import programs
from qwen35_jax.inference.placement import Placement
from qwen35_jax.inference.programs import Memory
from qwen35_jax.inference.rows import Emission, Limits, Rows, fresh_rows, limits_of
from qwen35_jax.inference.runnable import RunnableModel
from qwen35_jax.inference.sampling import Sampling, stack_settings
from qwen35_jax.inference.settings import GenerationSettings
from qwen35_jax.inference.speculation import Speculation
from qwen35_jax.model import Parameters
from qwen35_jax.ops.moving import as_bits

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
    vocabulary_size: int,
    speculation: Speculation | None,
) -> Slots:
    """Slots in which nobody has been.

    Args:
        model: that will run in them.
        placement: of its parameters.
        slots: how many.
        capacity: tokens that each has room for.
        vocabulary_size: see `Limits`; like `pad_id` it is the same for all tenants.
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
                    settings, [()] * slots, vocabulary_size=vocabulary_size, pad_id=text.pad_token_id or 0
                ),
            )
        ),
    )


def row_of(tree: Tree, slot: Int[Array, ""]) -> Tree:
    """One row of every array, as a batch of one. Values without rows stay as they are."""

    def cut(array: Array, axis: int) -> Array:
        return as_bits(lambda array: jax.lax.dynamic_slice_in_dim(array, slot, 1, axis))(array)

    return _by_batch_axis(cut, tree)


def with_row(tree: Tree, row: Tree, slot: Int[Array, ""]) -> Tree:
    """The tree with one row of every array replaced."""

    def put(array: Array, axis: int, new: Array) -> Array:
        write = as_bits(lambda array, new: jax.lax.dynamic_update_slice_in_dim(array, new, slot, axis))
        return write(array, new.astype(array.dtype))

    return _by_batch_axis(put, tree, row)


def _by_batch_axis(function: Callable[..., Array], *trees: Tree) -> Tree:
    """Maps over arrays with their batch axis: the second of what a cache stacks over layers, the first elsewhere."""

    def one(node: Any, *others: Any) -> Any:
        if isinstance(node, Cache):
            stacked = jax.tree.map(
                lambda array, *rest: function(array, 1, *rest),
                node.groups,
                *(other.groups for other in others),
            )
            lengths = function(node.lengths, 0, *(other.lengths for other in others))
            return dataclasses.replace(node, groups=stacked, lengths=lengths)
        return function(node, 0, *others) if node.ndim else node

    return jax.tree.map(one, *trees, is_leaf=lambda node: isinstance(node, Cache))


@functools.partial(jax.jit, static_argnums=0, donate_argnames="slots")
def occupy(placement: Placement, slots: Slots, slot: Int[Array, ""], tenant: Tenant) -> Slots:
    """Empties a slot of all that its last tenant left, and writes down what the new one asks for."""
    nothing = jax.tree.map(jnp.zeros_like, row_of(slots.memory, slot))
    memory = with_row(slots.memory, nothing, slot)
    settings = with_row(Tenant(slots.rows, slots.sampling, slots.limits), tenant, slot)
    return placement.keep(Slots(memory, *settings))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnames="slots")
def prefill_slot(
    graphdef: nnx.GraphDef,
    placement: Placement,
    parameters: Parameters,
    slots: Slots,
    slot: Int[Array, ""],
    tokens: Int[Array, "1 time"],
    segment_ids: Int[Array, "1 time"],
) -> Slots:
    """Consumes the next piece of the prompt in one slot. Arguments as for `programs.prefill_chunk`."""
    row = programs.prefill_chunk(
        graphdef, placement, parameters, row_of(slots.memory, slot), tokens, segment_ids
    )
    return placement.keep(slots._replace(memory=with_row(slots.memory, row, slot)))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnames="slots")
def start_slot(
    graphdef: nnx.GraphDef,
    placement: Placement,
    parameters: Parameters,
    slots: Slots,
    slot: Int[Array, ""],
) -> tuple[Slots, Emission]:
    """Draws the first token after a slot's prompt. From here on the slot decodes.

    Returns:
        The slots, and the draw [1].
    """
    one = row_of(slots, slot)
    rows = one.rows._replace(active=jnp.ones_like(one.rows.active))
    memory, rows, emission = programs.first_token(
        graphdef, placement, parameters, one.memory, rows, one.sampling, one.limits
    )
    slots = with_row(slots, one._replace(memory=memory, rows=rows), slot)
    return placement.keep(slots), emission


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="steps", donate_argnames="slots")
def decode_slots(
    graphdef: nnx.GraphDef,
    placement: Placement,
    parameters: Parameters,
    slots: Slots,
    keep: Bool[Array, "batch"],
    *,
    steps: int,
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
        steps=steps,
    )
    return slots._replace(memory=memory, rows=rows), emissions
