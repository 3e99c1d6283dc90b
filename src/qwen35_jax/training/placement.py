"""Where a run's arrays lie: its mesh, the rows of a step, and the state, optimizer included."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from qwen35_jax.errors import ConfigError
from qwen35_jax.logical_axes import MESH_AXES, mesh_axes, shards
from qwen35_jax.model import Parameters
from qwen35_jax.training.train_step import TrainState, init_train_state


class TokenBatch(Protocol):
    """A batch of an objective: a named tuple, of rows of tokens and what belongs to them."""

    @property
    def tokens(self) -> Int[Array, "*micro_batches batch time"]: ...


AnyBatch = TypeVar("AnyBatch", bound=TokenBatch)


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
    """The mesh of a run.

    Args:
        sizes: of the axes; without any, all devices are on `fsdp`. One process may take fewer devices than it has.

    Raises:
        ConfigError: an axis is unknown, there are fewer devices, or several processes have more.
    """
    sizes = dict(sizes) or {"fsdp": jax.device_count()}
    if unknown := sizes.keys() - set(MESH_AXES):
        raise ConfigError(f"run.mesh has the axes {sorted(unknown)}, expected some of {list(MESH_AXES)}")
    count = math.prod(sizes.values())
    axes = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
    if count > jax.device_count():
        raise ConfigError(
            f"run.mesh ({axes}) takes {count} devices, found {jax.device_count()}: choose smaller axes"
        )
    if count < jax.device_count() and jax.process_count() > 1:
        raise ConfigError(
            f"run.mesh ({axes}) takes {count} devices of the {jax.device_count()} that {jax.process_count()} processes "
            "have, expected all of them: choose larger axes, or start fewer processes"
        )
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=jax.devices()[:count],
    )


def check_rows(mesh: Mesh | AbstractMesh, rows: int) -> None:
    """Raises `ConfigError` where devices cannot share the rows of a micro-batch evenly: some would do others' work."""
    parts = shards(mesh, "batch")
    if rows % parts:
        axes = " and ".join(mesh_axes(mesh, "batch"))
        raise ConfigError(
            f"a micro-batch has {rows} rows (data.rows_per_step over data.micro_batches), expected a multiple of the "
            f"{parts} devices along mesh axis {axes}"
        )


def check_row_length(mesh: Mesh | AbstractMesh, row_length: int) -> None:
    """Raises `ConfigError` where rows cannot be cut evenly over the devices that share them."""
    parts = shards(mesh, "time")
    if row_length % parts:
        raise ConfigError(
            f"data.row_length is {row_length}, expected a multiple of the {parts} devices along mesh axis "
            f"{' and '.join(mesh_axes(mesh, 'time'))}"
        )


def held_rows(mesh: Mesh, rows: int) -> Int[np.ndarray, " held"]:
    """The rows of a micro-batch of which devices of this process hold a part, in order.

    They need not be neighbours, and where a mesh cuts time or weights across processes, several hold the same.

    Args:
        mesh: of the run.
        rows: of the micro-batch; `check_rows` has found them good.
    """
    blocks = _held_blocks(mesh)
    return np.arange(rows).reshape(shards(mesh, "batch"), -1)[blocks].reshape(-1)


def place_batch(mesh: Mesh, batch: AnyBatch) -> AnyBatch:
    """A batch on the devices of all processes, its rows cut as the rules say, and its tokens too.

    Args:
        mesh: of the run.
        batch: a named tuple of NumPy arrays [micro_batches held ...], with the rows that `held_rows` names, and
            `tokens` [micro_batches held time] among its fields. Of arrays as long as these, the last axis is time.
    """
    blocks = _held_blocks(mesh)
    time = batch.tokens.shape[-1]

    def place(array: np.ndarray) -> jax.Array:
        block = array.shape[1] // len(blocks)
        shape = (array.shape[0], block * shards(mesh, "batch"), *array.shape[2:])
        over_time = mesh_axes(mesh, "time") if array.shape[-1] == time else ()

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # only asked for devices of this process
            # Where a device's rows are among those that this process has: whole blocks of them.
            first, stop, _ = index[1].indices(shape[1])
            at = block * int(np.searchsorted(blocks, first // block))
            return array[index[0], at : at + stop - first, index[2]]

        cut = NamedSharding(mesh, PartitionSpec(None, mesh_axes(mesh, "batch") or None, over_time or None))
        return jax.make_array_from_callback(shape, cut, part)

    return jax.tree.map(place, batch)


def _held_blocks(mesh: Mesh) -> Int[np.ndarray, " blocks"]:
    """Of as many blocks of rows as the rules cut a micro-batch into, those that lie on devices of this process."""
    parts = shards(mesh, "batch")
    cut = NamedSharding(mesh, PartitionSpec(mesh_axes(mesh, "batch") or None))
    starts = [
        index[0].indices(parts)[0]
        for index in cut.addressable_devices_indices_map((parts,)).values()
        if index
    ]
    return np.unique(starts)


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
