"""What is read off programs that the TPU compiler made, for programs whose costs are known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from qwen35_jax.chips import GIB
from qwen35_jax.planning.compiling import CompiledPlan, TooLarge, compile_for
from qwen35_jax.planning.topologies import make_mesh, parse_topology

LAYERS, ROWS, WIDTH, DEVICES = 7, 1024, 512, 4


@pytest.fixture(scope="module")
def layers() -> CompiledPlan:
    """Products with weights that are gathered from four devices, one after the other, and a sum over the devices."""
    topology = parse_topology("v5e:2x2")
    mesh = make_mesh(topology, {"fsdp": DEVICES})
    cut = PartitionSpec("fsdp"), PartitionSpec(None, "fsdp")

    def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        whole = jax.lax.all_gather(weight, "fsdp", tiled=True)
        return jnp.tanh(x @ whole), None

    def program(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.psum(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32).sum(0), "fsdp")

    sizes = (ROWS, WIDTH), (LAYERS, WIDTH, WIDTH)
    arguments = tuple(
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(sizes, cut, strict=True)
    )
    run = jax.jit(jax.shard_map(program, mesh=mesh, in_specs=cut, out_specs=PartitionSpec()))
    compiled = compile_for(run, arguments, mesh, topology)
    assert isinstance(compiled, CompiledPlan)
    return compiled


def test_the_products_of_every_trip_are_counted(layers):
    assert layers.costs.flops == LAYERS * 2 * (ROWS // DEVICES) * WIDTH * WIDTH
    assert layers.costs.matrix_flops == layers.costs.flops  # bfloat16: the matrix unit goes over them once
    assert layers.costs.unknown_loops == 0


def test_the_collectives_of_every_trip_are_counted(layers):
    found = {each.kind: each for each in layers.costs.collectives}
    gathers, sums = found["all-gather"], found["all-reduce"]
    part = WIDTH // DEVICES * WIDTH * 2
    assert (gathers.group, gathers.count, gathers.nbytes) == (DEVICES, LAYERS, LAYERS * part * (DEVICES - 1))
    assert (sums.group, sums.count) == (DEVICES, 1)
    assert sums.nbytes == 2 * WIDTH * 4 * (DEVICES - 1) // DEVICES


def test_memory_is_what_a_device_holds_and_reads(layers):
    arguments = (ROWS * WIDTH + LAYERS * WIDTH * WIDTH) // DEVICES * 2
    assert arguments <= layers.memory.arguments <= 1.1 * arguments
    assert arguments <= layers.costs.hbm_bytes
    assert layers.memory.peak >= layers.memory.arguments + layers.memory.temporaries


def test_a_program_that_is_too_large_is_told_and_no_error():
    topology = parse_topology("v5e:1x1")
    mesh = make_mesh(topology, {"data": 1})
    whole = NamedSharding(mesh, PartitionSpec())
    array = jax.ShapeDtypeStruct((20, GIB // 4), jnp.float32, sharding=whole)
    found = compile_for(jax.jit(lambda x: x + 1), (array,), mesh, topology)
    assert isinstance(found, TooLarge)
    assert found.needed >= 20 * GIB > 16 * GIB >= found.available
