"""Compiles a program for devices that are not there, and says what it takes of each of them."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from typing import Any

import jax

from qwen35_jax.chips import GIB
from qwen35_jax.planning.costs import Costs, count_costs
from qwen35_jax.planning.hlo import parse
from qwen35_jax.planning.loops import count_runs
from qwen35_jax.planning.topologies import Topology


@dataclasses.dataclass(frozen=True)
class Memory:
    """Main memory of one device, in bytes.

    Attributes:
        arguments: what the program is given.
        outputs: what it returns in memory of its own, beside arguments that it takes over.
        temporaries: what it needs in between.
        program: its own code.
    """

    arguments: int
    outputs: int
    temporaries: int
    program: int

    @property
    def peak(self) -> int:
        return self.arguments + self.outputs + self.temporaries + self.program


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The least time that the limits of a chip allow, each limit by itself, in seconds."""

    compute: float
    memory: float
    interconnect: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory, self.interconnect)

    @property
    def bound_by(self) -> str:
        return max(dataclasses.asdict(self).items(), key=lambda item: item[1])[0]


@dataclasses.dataclass(frozen=True)
class CompiledPlan:
    """A program that fits its devices.

    Attributes:
        memory: of one device.
        costs: of one execution on one device.
        roofline: of these.
        compile_seconds: tracing, lowering and compiling.
    """

    memory: Memory
    costs: Costs
    roofline: Roofline
    compile_seconds: float


@dataclasses.dataclass(frozen=True)
class TooLarge:
    """A program that does not fit, in the compiler's own numbers.

    Attributes:
        needed: bytes of main memory.
        available: bytes of main memory.
        compile_seconds: until that was found.
    """

    needed: int
    available: int
    compile_seconds: float


def compile_for(
    traceable: Any, arguments: tuple[Any, ...], mesh: Any, topology: Topology, *, trips_where_unknown: int = 1
) -> CompiledPlan | TooLarge:
    """Compiles a jitted function for the devices of a mesh.

    Args:
        traceable: with a `trace` method: a jitted function.
        arguments: shapes, dtypes and shardings, and what is static.
        mesh: from `topologies.make_mesh`.
        topology: whose devices these are.
        trips_where_unknown: of loops whose length depends on data.
    """
    began = time.perf_counter()
    with jax.set_mesh(mesh):
        lowered = traceable.trace(*arguments).lower(lowering_platforms=("tpu",))
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            sizes = out_of_memory(str(error))
            if sizes is None:
                raise
            return TooLarge(*sizes, time.perf_counter() - began)
    seconds = time.perf_counter() - began
    stats = compiled.memory_analysis()
    memory = Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes - stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        program=stats.generated_code_size_in_bytes,
    )
    module = parse(compiled.as_text())
    runs = count_runs(module, trips_where_unknown=trips_where_unknown)
    costs = count_costs(module, runs, devices=topology.devices)
    return CompiledPlan(memory, costs, roofline(costs, topology), seconds)


def roofline(costs: Costs, topology: Topology) -> Roofline:
    """The time that each limit of the chip allows at least."""
    chip = topology.chip
    return Roofline(
        compute=costs.matrix_flops / chip.flops,
        memory=costs.hbm_bytes / chip.hbm_bandwidth,
        interconnect=costs.sent_bytes / chip.link_bandwidth,
    )


def out_of_memory(message: str) -> tuple[int, int] | None:
    """Bytes that were needed and that there are, from the compiler's complaint; None for any other error."""
    size = r"([\d.]+)([KMGT]?)"
    complaints = f"Used {size} of {size} hbm", rf"\({size}\) exceeds available HBM \({size}\)"
    found = next(filter(None, (re.search(each, message) for each in complaints)), None)
    if found is None:
        return None
    units = {"": 1, "K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}
    return int(float(found[1]) * units[found[2]]), int(float(found[3]) * units[found[4]])


def bytes_per_device(tree: Any) -> int:
    """Of shapes with shardings, the bytes that one device holds."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def placed(shapes: Any, shardings: Any) -> Any:
    """Shapes and dtypes, with where they lie."""
    return jax.tree.map(
        lambda leaf, cut: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=cut), shapes, shardings
    )
