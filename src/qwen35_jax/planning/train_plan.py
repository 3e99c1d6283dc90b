"""The trainer's step of a model, compiled for a slice of TPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from qwen35_jax.config import ModelConfig
from qwen35_jax.errors import ConfigError
from qwen35_jax.logical_axes import mesh_axes, shards
from qwen35_jax.model import abstract_model
from qwen35_jax.planning.compiling import CompiledPlan, TooLarge, bytes_per_device, compile_for, placed
from qwen35_jax.planning.topologies import Topology, abstract_mesh, make_mesh
from qwen35_jax.sharding import parameter_axes, shardings
from qwen35_jax.training.lora import LoRA
from qwen35_jax.training.objective import Batch, Objective
from qwen35_jax.training.optimizers import OptimizerSettings, make_optimizer
from qwen35_jax.training.placement import abstract_train_state
from qwen35_jax.training.train_step import train_step
from qwen35_jax.training.trained_part import trained_part

_STEPS = 1000
"""Of the run that the step is of. Its schedule is arithmetic on the step's number: any run has the same program."""


@dataclasses.dataclass(frozen=True)
class TrainPlan:
    """What a step takes.

    Attributes:
        mesh: sizes of its axes.
        rows: of a step.
        row_length: tokens of each.
        weights_bytes: of the model on one device, and of the adapter if there is one.
        optimizer_bytes: on one device, of what is kept beside them.
        compiled: the program.
    """

    mesh: Mapping[str, int]
    rows: int
    row_length: int
    weights_bytes: int
    optimizer_bytes: int
    compiled: CompiledPlan | TooLarge


LANES = 128
"""Numbers that a TPU works on side by side. Its compiler gathers parts that are narrower by sums over the devices,
which sends twice as much and holds sums of gradients whole."""


def training_mesh(config: ModelConfig, topology: Topology) -> dict[str, int]:
    """As many devices as can share rows and weights, which is the least to send; the others share the heads.

    Where they do not divide these, they share the rows alone.
    """
    devices, width = topology.devices, config.text.hidden_size
    fsdp = max(
        size
        for size in range(1, devices + 1)
        if devices % size == 0 and width % size == 0 and (size == 1 or width // size >= LANES)
    )
    graphdef, shapes = abstract_model(config, parameter_dtype="bfloat16", dtype="bfloat16")
    axes = parameter_axes(graphdef, shapes)
    sizes = {"fsdp": fsdp, "tensor": devices // fsdp}
    try:
        shardings(abstract_mesh(sizes), axes, shapes)
    except ConfigError:
        sizes = {"data": devices // fsdp, "fsdp": fsdp}
    return {axis: size for axis, size in sizes.items() if size > 1} or {"fsdp": 1}


def plan_training(
    config: ModelConfig,
    topology: Topology,
    mesh_sizes: Mapping[str, int],
    *,
    rows: int | None = None,
    row_length: int,
    lora_rank: int | None,
    optimizer: Literal["adamw", "muon", "adafactor"],
) -> TrainPlan:
    """Compiles one step, computing in bfloat16 and rematerializing.

    Without an adapter all parameters are trained, in float32. With one they are kept in bfloat16, and the adapter is
    trained in float32.

    Args:
        config: of a dense model.
        topology: the slice.
        mesh_sizes: over all of its devices, as from `parse_mesh`.
        rows: of a step; None for one on each device, or on each that shares no row with others.
        row_length: tokens of each.
        lora_rank: of an adapter on all linear maps; None to train all parameters.
        optimizer: of the trained parameters.

    Raises:
        ConfigError: the mesh does not fit the model or the rows, or the TPU compiler is not installed.
    """
    if row_length > config.text.max_context:
        raise ConfigError(
            f"row length is {row_length}, expected at most {config.text.max_context}, the context of the model"
        )
    kept_in = "float32" if lora_rank is None else "bfloat16"
    graphdef, shapes = abstract_model(config, parameter_dtype=kept_in, dtype="bfloat16")
    axes = parameter_axes(graphdef, shapes)
    lora = None if lora_rank is None else LoRA(rank=lora_rank)
    on_paper = abstract_mesh(mesh_sizes)
    trained_part(
        config, on_paper, shapes, axes, lora
    )  # a mesh that does not fit is refused before anything slow
    sharing = shards(on_paper, "batch")
    rows = sharing if rows is None else rows
    if rows % sharing:
        raise ConfigError(
            f"rows of a step are {rows}, expected a multiple of the {sharing} devices that share them along mesh axes "
            f"{' and '.join(mesh_axes(on_paper, 'batch'))}"
        )

    mesh = make_mesh(topology, mesh_sizes)
    part = trained_part(config, mesh, shapes, axes, lora)
    moves = make_optimizer(OptimizerSettings(name=optimizer), part.axes, steps=_STEPS)
    state = abstract_train_state(mesh, part.trained_shardings, part.trained, moves, seed=0)
    frozen = None if part.frozen is None else placed(part.frozen, part.frozen_shardings)
    cut = NamedSharding(mesh, PartitionSpec(None, mesh_axes(mesh, "batch") or None, None))
    arrays: list[Any] = [
        jax.ShapeDtypeStruct((1, rows, row_length), dtype, sharding=cut)
        for dtype in (jnp.int32, jnp.int32, jnp.float32)
    ]
    compiled = compile_for(
        _Step(part.parameters_of),
        (graphdef, moves, Objective(), state, Batch(*arrays), frozen),
        mesh,
        topology,
    )
    return TrainPlan(
        dict(mesh_sizes),
        rows,
        row_length,
        bytes_per_device((state.parameters, frozen)),
        bytes_per_device(state.optimizer),
        compiled,
    )


@dataclasses.dataclass(frozen=True)
class _Step:
    """`train_step` with what it takes by name."""

    parameters_of: Any

    def trace(self, *arguments: Any) -> Any:
        return train_step.trace(*arguments, parameters_of=self.parameters_of)
