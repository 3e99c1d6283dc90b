"""The slots on their device, and every call that moves them on. No call waits: what it returns is on its way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int, UInt32

from qwen35_jax.inference.engine.prefix_cache import BLOCK, Hit, PrefixCache
from qwen35_jax.inference.engine.request import Request
from qwen35_jax.inference.engine.slots import (
    Tenant,
    decode_slot,
    decode_slots,
    empty_slots,
    occupy,
    prefill_slot,
    start_slot,
)
from qwen35_jax.inference.engine.snapshots import (
    Block,
    Snapshot,
    put_snapshot,
    read_block,
    take_snapshot,
    write_block,
)
from qwen35_jax.inference.placement import Placement
from qwen35_jax.inference.rows import Allowed, Emission, fresh_rows, limits_of
from qwen35_jax.inference.runnable import RunnableModel
from qwen35_jax.inference.sampling import stack_settings
from qwen35_jax.inference.speculation import Speculation

AllowedBits = UInt32[np.ndarray, "words"]
"""See `Constraint.allowed`."""

Part = TypeVar("Part", Block, Snapshot)
Tree = TypeVar("Tree")
Place = Literal["host", "device"]
PROGRAMS = (
    occupy,
    prefill_slot,
    start_slot,
    decode_slot,
    decode_slots,
    read_block,
    write_block,
    take_snapshot,
    put_snapshot,
)


class SlotRunner:
    """A fixed number of slots of one model.

    Args:
        model: that runs in them.
        placement: of its parameters.
        slots: how many.
        context: tokens that each has room for.
        drawable: see `limits_of`.
        speculation: see `generate`.
        keep_prefixes: where what is remembered of prefixes lies.
    """

    def __init__(
        self,
        model: RunnableModel,
        placement: Placement,
        *,
        slots: int,
        context: int,
        drawable: int,
        speculation: Speculation | None,
        keep_prefixes: Place,
    ):
        self._text = model.config.text
        self._placement = placement
        self._static = model.graphdef, placement, as_results_lie(model.parameters)
        self._count = slots
        self._drawable = drawable
        self._keep_prefixes = keep_prefixes
        self._slots = as_results_lie(
            empty_slots(
                model,
                placement,
                slots=slots,
                capacity=-(-context // BLOCK) * BLOCK,  # whole blocks, which the prefix cache copies
                drawable=drawable,
                speculation=speculation,
            )
        )
        self._anything = {rows: self._allowed([None] * rows) for rows in {1, slots}}

    def occupy(self, slot: int, request: Request, seed: int) -> None:
        """Empties a slot and gives it to a request."""
        tenant = Tenant(
            rows=fresh_rows([request.prompt], self._text.vocab_size, active=[False]),
            sampling=stack_settings([request.settings], [seed]),
            limits=limits_of(
                [request.settings],
                [request.stop_ids],
                vocab_size=self._text.vocab_size,
                drawable=self._drawable,
                pad_id=self._text.pad_token_id or 0,
            ),
        )
        self._slots = occupy(self._placement, self._slots, jnp.int32(slot), self._placement.put(tenant))

    def consume(self, slot: int, tokens: Sequence[int], padded_length: int) -> Int[Array, "1"]:
        """Consumes a piece of a prompt, and returns how many tokens the slot has consumed."""
        padded = np.zeros((1, padded_length), np.int32)
        padded[0, : len(tokens)] = tokens
        segment_ids = (np.arange(padded_length) < len(tokens)).astype(np.int32)[None]
        self._slots, consumed = prefill_slot(*self._static, self._slots, jnp.int32(slot), padded, segment_ids)
        return consumed

    def start(self, slot: int, bits: AllowedBits | None) -> Emission:
        """Draws the first token after a prompt, [1]; `bits` are those of its grammar."""
        allowed = self._anything[1] if bits is None else self._allowed([bits])
        self._slots, emission = start_slot(*self._static, self._slots, jnp.int32(slot), allowed)
        return emission

    def decode(
        self, going_on: Mapping[int, bool], bits: Mapping[int, AllowedBits], *, passes: int
    ) -> tuple[Emission, dict[int, int]]:
        """A block of decoding.

        Args:
            going_on: for every slot that decodes, false to end its row.
            bits: of the grammars of slots that have one. Then `passes` is 1.
            passes: of the model, at most, up to `PASSES_IN_A_BLOCK`.

        Returns:
            The emissions [PASSES_IN_A_BLOCK position row], and each slot's row among them.
        """
        alone = len(going_on) == 1
        slots = [*going_on] if alone else [*range(self._count)]
        keep = np.array([going_on.get(slot, False) for slot in slots])
        allowed = self._anything[len(slots)]
        if bits:
            allowed = self._allowed([bits.get(slot) for slot in slots])
        if alone:
            self._slots, emissions = decode_slot(
                *self._static, self._slots, jnp.int32(slots[0]), keep, allowed, steps=passes
            )
        else:
            self._slots, emissions = decode_slots(*self._static, self._slots, keep, allowed, steps=passes)
        return emissions, {slot: row for row, slot in enumerate(slots)}

    def remember(self, cache: PrefixCache[Block, Snapshot], slot: int, tokens: Sequence[int]) -> None:
        """Keeps what a slot remembers, which is of exactly these tokens."""
        where = jnp.int32(slot)
        cache.add(
            tokens,
            lambda start: self._kept(
                read_block(self._placement, self._slots.memory, where, jnp.int32(start))
            ),
            lambda: self._kept(take_snapshot(self._placement, self._slots.memory, where)),
        )

    def restore(self, slot: int, hit: Hit[Block, Snapshot]) -> None:
        """Puts a remembered prefix into an empty slot."""
        where = jnp.int32(slot)
        for index, block in enumerate(hit.blocks):
            start = jnp.int32(index * BLOCK)
            self._slots = write_block(self._placement, self._slots, where, start, self._on_device(block))
        snapshot = self._on_device(hit.snapshot)
        self._slots = put_snapshot(self._placement, self._slots, where, snapshot)

    def warm_up(self, request: Request, buckets: Sequence[int]) -> None:
        """Compiles every program, on a request that nobody asked for."""
        for bucket in buckets:
            self.occupy(0, request, seed=0)
            self.consume(0, request.prompt[:1], bucket)
        cache: PrefixCache[Block, Snapshot] = PrefixCache(2**62, tree_bytes)
        self.remember(cache, 0, request.prompt[:1])
        hit = cache.find([*request.prompt[:1], 0])
        assert hit is not None
        self.restore(0, hit)
        self.start(0, None)
        self.decode({0: False}, {}, passes=1)
        self.decode(dict.fromkeys(range(self._count), False), {}, passes=1)
        self.occupy(0, request, seed=0)
        jax.block_until_ready(self._slots)

    def _allowed(self, grammars: Sequence[AllowedBits | None]) -> Allowed:
        """The bits of each row; None where it has no grammar."""
        words = -(-self._text.vocab_size // 32)
        bits = np.full((len(grammars), words), np.iinfo(np.uint32).max, np.uint32)
        for row, allowed in enumerate(grammars):
            if allowed is not None:
                bits[row] = allowed
        constrained = np.array([allowed is not None for allowed in grammars])
        return self._placement.put(Allowed(jnp.asarray(bits), jnp.asarray(constrained)))

    def _kept(self, part: Part) -> Part:
        if self._keep_prefixes == "device":
            return part
        return jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host")), part)

    def _on_device(self, part: Part) -> Part:
        if self._keep_prefixes == "device":
            return part
        return jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind("device")), part)


def as_results_lie(tree: Tree) -> Tree:
    """The same arrays, which lie where they did, but with shardings written as JAX writes those of a program's results.

    On a mesh, `P("data", None)` and `P("data")` mean the same, but a program that has been called with one of them is
    compiled once more when it is called with the other.
    """

    def rewritten(array: Array) -> Array:
        sharding = array.sharding
        if not isinstance(sharding, NamedSharding):
            return array
        axes = [*sharding.spec]
        while axes and axes[-1] is None:
            axes.pop()
        cut = NamedSharding(sharding.mesh, PartitionSpec(*axes), memory_kind=sharding.memory_kind)
        shards = [shard.data for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, cut, shards)

    return jax.tree.map(rewritten, tree)


def tree_bytes(tree: Block | Snapshot) -> int:
    """What the arrays of a block or a snapshot take on all devices: on a mesh, several may have a copy of the same."""
    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize * array.sharding.num_devices
        for array in jax.tree.leaves(tree)
    )


def compiled_programs() -> int:
    """Programs that engines of this process have compiled."""
    # JAX has no public way to ask a jitted function for the number of its programs.
    return sum(
        program._cache_size()  # pyright: ignore[reportAttributeAccessIssue]
        for program in PROGRAMS
    )
