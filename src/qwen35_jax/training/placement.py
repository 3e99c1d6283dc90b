"""Where a run's arrays lie: its mesh, the rows of a step, and the state, optimizer included."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from qwen35_jax.errors import ConfigError
from qwen35_jax.logical_axes import MESH_AXES, mesh_axes, shards
from qwen35_jax.model import Parameters
from qwen35_jax.training.objective import Batch
from qwen35_jax.training.train_step import TrainState, init_train_state


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
    """The mesh of a run.

    Args:
        sizes: of the axes; without any, all devices are on `fsdp`. Fewer devices than there are may be taken.

    Raises:
        ConfigError: an axis is unknown, or there are fewer devices.
    """
    sizes = dict(sizes) or {"fsdp": jax.device_count()}
    if unknown := sizes.keys() - set(MESH_AXES):
        raise ConfigError(f"run.mesh has the axes {sorted(unknown)}, expected some of {list(MESH_AXES)}")
    count = math.prod(sizes.values())
    if count > jax.device_count():
        axes = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise ConfigError(
            f"run.mesh ({axes}) takes {count} devices, found {jax.device_count()}: choose smaller axes"
        )
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=jax.devices()[:count],
    )


def check_rows(mesh: Mesh, rows: int) -> None:
    """Raises `ConfigError` where devices cannot share the rows of a micro-batch evenly: some would do others' work."""
    parts = shards(mesh, "batch")
    if rows % parts:
        axes = " and ".join(mesh_axes(mesh, "batch"))
        raise ConfigError(
            f"a micro-batch has {rows} rows (data.rows_per_step over data.micro_batches), expected a multiple of the "
            f"{parts} devices along mesh axis {axes}"
        )


def place_batch(mesh: Mesh, batch: Batch) -> Batch:
    """A batch of NumPy arrays [micro_batches, rows of this process, time] on the devices of all processes."""
    cut = NamedSharding(mesh, PartitionSpec(None, mesh_axes(mesh, "batch") or None, None))
    return jax.tree.map(lambda array: jax.make_array_from_process_local_data(cut, array), batch)


def state_shardings(mesh: Mesh, parameter_shardings: Any, parameters: Parameters, state: Any) -> Any:
    """A sharding for every array of a state: what stands for a parameter, as its moments do, lies where that does.

    Left to itself, the compiler would give every device all moments: nothing tells it that zeros in the shape of a
    parameter belong to it.

    Args:
        mesh: of the run.
        parameter_shardings: of the parameters that are trained.
        parameters: these, or their shapes.
        state: tree of arrays or of their shapes. An array belongs to a parameter if the dictionary keys at the end of
            its path are that parameter's, and its shape is too. Others are whole everywhere.
    """
    cuts = jax.tree.leaves(parameter_shardings)
    known = {
        (_dictionary_keys(path), array.shape): cut
        for (path, array), cut in zip(jax.tree_util.tree_leaves_with_path(parameters), cuts, strict=True)
    }
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree_util.tree_map_with_path(
        lambda path, array: known.get((_dictionary_keys(path), array.shape), whole), state
    )


def abstract_train_state(
    mesh: Mesh,
    parameter_shardings: Any,
    parameters: Parameters,
    optimizer: optax.GradientTransformation,
    *,
    seed: int,
) -> TrainState:
    """Shapes, dtypes and shardings of a run's state, without data.

    Args:
        mesh: of the run.
        parameter_shardings: of the parameters that are trained.
        parameters: these, or their shapes and dtypes.
        optimizer: of the run.
        seed: of what is random in a step.
    """
    shapes = jax.eval_shape(lambda given: init_train_state(given, optimizer, seed=seed), parameters)
    return jax.tree.map(
        lambda leaf, cut: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=cut),
        shapes,
        state_shardings(mesh, parameter_shardings, parameters, shapes),
    )


def place_train_state(
    parameters: Parameters, optimizer: optax.GradientTransformation, abstract: TrainState, *, seed: int
) -> TrainState:
    """`init_train_state`, with every array where `abstract_train_state` has it. Takes the parameters."""
    return jax.jit(
        lambda given: init_train_state(given, optimizer, seed=seed),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract),
        donate_argnums=0,
    )(parameters)


def _dictionary_keys(path: Any) -> tuple[Any, ...]:
    """The dictionary keys at the end of a path."""
    keys: list[Any] = []
    for entry in reversed(path):
        if not isinstance(entry, jax.tree_util.DictKey):
            break
        keys.append(entry.key)
    return tuple(reversed(keys))
