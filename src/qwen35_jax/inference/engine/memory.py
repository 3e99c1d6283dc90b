"""What an engine's slots take of the device's memory, and how much context they can be given."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Literal

import jax

from qwen35_jax.errors import CapacityError, PromptError
from qwen35_jax.inference.placement import Placement
from qwen35_jax.inference.programs import memory_shapes
from qwen35_jax.inference.runnable import RunnableModel
from qwen35_jax.inference.speculation import Speculation

SHARE = 0.6
"""Of the free memory, what slots may take. The rest is for activations, and for what else runs there."""

LEAST_CONTEXT = 512
USUAL_CONTEXT = 32768
"""Of a slot, where nothing is asked for: what most requests fit into."""

PREFIX_CACHE_SHARE = 0.1
"""Of the free memory, what remembered prefixes may take where nothing is asked for."""


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What the slots of an engine take.

    Attributes:
        slots: requests that run at the same time.
        context: tokens that each has room for.
        slot_bytes: of one slot, over all devices.
        free_bytes: of the device before the slots were made; None where it does not say.
    """

    slots: int
    context: int
    slot_bytes: int
    free_bytes: int | None

    @property
    def bytes(self) -> int:
        """Of all slots."""
        return self.slots * self.slot_bytes


def plan_memory(
    model: RunnableModel,
    *,
    slots: int,
    context: int | None,
    speculation: Speculation | None,
    placement: Placement,
) -> MemoryPlan:
    """Works out the context of each slot, or checks the one asked for.

    Args:
        model: that will run in them; its parameters are on the device already.
        slots: how many.
        context: tokens that each is to have room for; None takes as many as fit, in powers of two, up to the model's
            and to 32,768.
        speculation: see `generate`.
        placement: of the parameters.

    Raises:
        PromptError: the context is more than the model's.
        CapacityError: it does not fit into the memory that is free.
    """
    most = model.config.text.max_context
    if context is not None and not 1 <= context <= most:
        raise PromptError(f"context is {context}, expected between 1 and the model's {most}")
    devices = placement.whole.device_set
    free = _free_bytes(next(iter(devices)))

    def plan(tokens: int) -> MemoryPlan:
        shapes = memory_shapes(model, batch=1, capacity=tokens, speculation=speculation)
        nbytes = sum(shape.size * shape.dtype.itemsize for shape in jax.tree.leaves(shapes))
        return MemoryPlan(slots, tokens, nbytes, free)

    def fits(found: MemoryPlan) -> bool:
        return free is None or found.bytes <= SHARE * free * len(devices)

    chosen = plan(context or min(LEAST_CONTEXT, most))
    if free is not None and not fits(chosen):
        raise CapacityError(
            f"{slots} slots of {chosen.context} tokens take {chosen.bytes / 2**30:.1f} GiB, and of the device's "
            f"{free / 2**30:.1f} GiB of free memory they may take {SHARE:.0%}: ask for fewer slots or less context"
        )
    usual = min(USUAL_CONTEXT, most)
    while context is None and chosen.context < usual:
        larger = plan(min(2 * chosen.context, usual))
        if not fits(larger):
            break
        chosen = larger
    return chosen


def prefix_cache_budget(place: Literal["host", "device"], placement: Placement) -> int:
    """Bytes for remembered prefixes, where nothing is asked for: a share of what is free in their place."""
    devices = placement.whole.device_set
    free = _free_host_bytes() if place == "host" else _free_bytes(next(iter(devices)))
    return int(PREFIX_CACHE_SHARE * (free or 0) * (1 if place == "host" else len(devices)))


def _free_host_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_bytes(device: Any) -> int | None:
    """What a device has left; on a CPU, what the machine has."""
    if device.platform == "cpu":
        return _free_host_bytes()
    statistics = device.memory_stats()
    if not statistics or "bytes_limit" not in statistics:
        return None
    return statistics["bytes_limit"] - statistics["bytes_in_use"]
