"""Slots on the device: taking a row out and putting it back touches that row and no other."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from qwen35_jax.cache import AttentionCache, Cache
from qwen35_jax.inference.engine.slots import Tenant, empty_slots, occupy, row_of, with_row
from qwen35_jax.inference.placement import Placement
from tests.inference.tiny_model import tiny_model


def filled(tree, seed: int):
    """The same structure with numbers that are all different."""
    leaves, structure = jax.tree.flatten(tree)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(
        structure, [jnp.asarray(rng.integers(1, 90, leaf.shape)).astype(leaf.dtype) for leaf in leaves]
    )


def rows(tree, index: int) -> list[np.ndarray]:
    """One row of every array that has rows, a cache's layers having theirs in the second axis."""
    found = []
    for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Cache)):
        if isinstance(node, Cache):
            found += [np.asarray(leaf[:, index]) for leaf in jax.tree.leaves(node.groups)]
            found.append(np.asarray(node.lengths[index]))
        elif node.ndim:
            found.append(np.asarray(node[index]))
    return found


def without_attention(cache: Cache):
    return tuple(
        tuple(layer for layer in group if not isinstance(layer, AttentionCache)) for group in cache.groups
    )


def test_what_becomes_of_a_row_goes_in_alone_first_and_last_slot_included():
    model = tiny_model()
    placement = Placement.beside(model.parameters)
    slots = empty_slots(model, placement, slots=3, capacity=16, drawable=96, speculation=None)
    old, new = filled(slots, 1), filled(slots, 2)
    for slot in range(3):
        index = jnp.int32(slot)
        row = row_of(placement, new, index)
        (delta_net, attention), (_, whole) = row.memory.cache.groups[0], old.memory.cache.groups[0]
        assert delta_net.state.shape[1] == 1 and attention.key.shape == whole.key.shape
        changed = with_row(old, row, index)
        assert jax.tree.structure(changed) == jax.tree.structure(old)
        for other in range(3):
            source = new if other == slot else old
            for ours, theirs in zip(without_keys(changed, other), without_keys(source, other), strict=True):
                np.testing.assert_array_equal(ours, theirs)


def without_keys(slots, index: int) -> list[np.ndarray]:
    """As `rows`, without keys and values: those are never taken out."""
    cache = slots.memory.cache
    groups = tuple(
        tuple(layer for layer in group if not isinstance(layer, AttentionCache)) for group in cache.groups
    )
    cache = dataclasses.replace(cache, groups=groups)
    return rows(slots._replace(memory=slots.memory._replace(cache=cache)), index)


def test_b34_a_slot_is_emptied_for_its_tenant_and_the_others_stay_bit_for_bit():
    model = tiny_model()
    placement = Placement.beside(model.parameters)
    slots = filled(empty_slots(model, placement, slots=3, capacity=16, drawable=96, speculation=None), 3)
    before = jax.device_get(slots)
    tenant = row_of(placement, (slots.rows, slots.sampling, slots.limits), jnp.int32(0))
    after = occupy(placement, slots, jnp.int32(2), Tenant(*tenant))
    # Keys and values stay, of which nobody reads those beyond the row's length.
    memory = after.memory
    memory = memory._replace(cache=dataclasses.replace(memory.cache, groups=without_attention(memory.cache)))
    assert not any(row.any() for row in rows(memory, 2))
    for slot in (0, 1):
        for ours, theirs in zip(rows(after, slot), rows(before, slot), strict=True):
            np.testing.assert_array_equal(ours, theirs)
