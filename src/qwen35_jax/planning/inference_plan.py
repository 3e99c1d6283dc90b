"""Prefill and decoding of a model, compiled for a slice of TPUs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from qwen35_jax.cache import Cache
from qwen35_jax.config import ModelConfig
from qwen35_jax.errors import ConfigError
from qwen35_jax.inference.buckets import PREFILL_BUCKETS
from qwen35_jax.inference.placement import Placement
from qwen35_jax.inference.programs import Memory, memory_shapes, prefill_chunk
from qwen35_jax.model import Parameters, abstract_model, decode_step
from qwen35_jax.ops.attention import PAST_BLOCK
from qwen35_jax.planning.compiling import CompiledPlan, TooLarge, bytes_per_device, compile_for, placed
from qwen35_jax.planning.topologies import Topology, abstract_mesh, make_mesh
from qwen35_jax.sharding import parameter_axes, shardings


class _Described(NamedTuple):
    """A model of which only shapes are known."""

    config: ModelConfig
    graphdef: nnx.GraphDef
    parameters: Parameters
    folder: None = None


@dataclasses.dataclass(frozen=True)
class InferencePlan:
    """What answering takes.

    Attributes:
        mesh: sizes of its axes.
        batch: rows.
        context: tokens that each row has room for.
        piece: tokens of each row that a prefill consumes.
        weights_bytes: on one device.
        cache_bytes: on one device.
        prefill: the program of the last piece of prompts as long as the context.
        decode: the program of one token for each row, at the end of the context.
    """

    mesh: Mapping[str, int]
    batch: int
    context: int
    piece: int
    weights_bytes: int
    cache_bytes: int
    prefill: CompiledPlan | TooLarge
    decode: CompiledPlan | TooLarge


def inference_mesh(config: ModelConfig, topology: Topology) -> dict[str, int]:
    """Heads over as many devices as divide them, so that weights stay where they are, and rows over the others."""
    graphdef, shapes = abstract_model(config, parameter_dtype="bfloat16", dtype="bfloat16")
    axes = parameter_axes(graphdef, shapes)
    for rows in range(1, topology.devices):
        sizes = {"data": rows, "tensor": topology.devices // rows}
        if topology.devices % rows:
            continue
        with contextlib.suppress(ConfigError):
            shardings(abstract_mesh(sizes), axes, shapes)
            return {axis: size for axis, size in sizes.items() if size > 1}
    return {"data": topology.devices}


def plan_inference(
    config: ModelConfig,
    topology: Topology,
    mesh_sizes: Mapping[str, int],
    *,
    batch: int,
    context: int,
    dtype: DTypeLike = "bfloat16",
) -> InferencePlan:
    """Compiles a piece of a prefill and a decoding step.

    Args:
        config: of a dense model.
        topology: the slice.
        mesh_sizes: over all of its devices, as from `parse_mesh`.
        batch: rows.
        context: tokens that each row has room for.
        dtype: of weights and computation.

    Raises:
        ConfigError: the mesh does not fit the model, the context is longer than the model's, or the TPU compiler is not
            installed.
    """
    if context > config.text.max_context:
        raise ConfigError(
            f"context is {context}, expected at most {config.text.max_context}, that of the model"
        )
    graphdef, shapes = abstract_model(config, parameter_dtype=dtype, dtype=dtype)
    axes = parameter_axes(graphdef, shapes)
    shardings(
        abstract_mesh(mesh_sizes), axes, shapes
    )  # a mesh that does not fit is refused before anything slow

    mesh = make_mesh(topology, mesh_sizes)
    parameters = placed(shapes, shardings(mesh, axes, shapes))
    placement = Placement(NamedSharding(mesh, PartitionSpec()))
    described = _Described(config, graphdef, shapes)
    memory = memory_shapes(described, batch=batch, capacity=context, speculation=None)
    memory = _as_on_a_tpu(memory, dtype)
    memory = placed(memory, placement.shardings(memory))
    piece = min(context, PREFILL_BUCKETS[-1])

    def tokens(*shape: int) -> jax.ShapeDtypeStruct:
        token = jax.ShapeDtypeStruct(shape, jnp.int32)
        return placed(token, placement.shardings(token))

    return InferencePlan(
        dict(mesh_sizes),
        batch,
        context,
        piece,
        bytes_per_device(parameters),
        bytes_per_device(memory.cache),
        compile_for(
            prefill_chunk,
            (graphdef, placement, parameters, memory, tokens(batch, piece), tokens(batch, piece)),
            mesh,
            topology,
            trips_where_unknown=-(-(context - piece) // PAST_BLOCK),
        ),
        compile_for(
            _decode,
            (graphdef, placement, parameters, tokens(batch), memory.cache),
            mesh,
            topology,
            trips_where_unknown=-(-(context - 1) // PAST_BLOCK),
        ),
    )


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def _decode(
    graphdef: nnx.GraphDef,
    placement: Placement,
    parameters: Parameters,
    tokens: Int[Array, "batch"],
    cache: Cache,
) -> tuple[Float[Array, "batch vocab"], Cache]:
    """One token for each row, with the cache left where it lies, as in the loop of a generation."""
    return placement.keep(decode_step(graphdef, parameters, tokens, cache))


def _as_on_a_tpu(memory: Memory, dtype: DTypeLike) -> Memory:
    """Keys and values in the dtype of the computation: on the CPU of this process they would be kept as their bits."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype if leaf.dtype == jnp.uint16 else leaf.dtype),
        memory,
    )
