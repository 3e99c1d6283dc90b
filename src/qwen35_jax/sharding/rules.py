"""The rules of `qwen35_jax.logical_axes` over whole trees: of parameters and of caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from qwen35_jax.cache import Cache
from qwen35_jax.errors import ConfigError
from qwen35_jax.logical_axes import MESH_AXES, fitting_partition, partition
from qwen35_jax.model import Parameters

CACHE_AXES: Mapping[str, tuple[str, ...]] = {
    "window_q": ("repeats", "batch", "window", "key_heads", "key_dim"),
    "window_k": ("repeats", "batch", "window", "key_heads", "key_dim"),
    "window_v": ("repeats", "batch", "window", "value_heads", "value_dim"),
    "state": ("repeats", "batch", "value_heads", "key_dim", "value_dim"),
    "key": ("repeats", "batch", "capacity", "kv_heads", "head_dim"),
    "value": ("repeats", "batch", "capacity", "kv_heads", "head_dim"),
    "lengths": ("batch",),
    "first_row": (),
}


@dataclasses.dataclass(frozen=True)
class LogicalAxes:
    """Names of an array's axes, outermost first."""

    names: tuple[str, ...]


def parameter_axes(graphdef: nnx.GraphDef, parameters: Parameters) -> Parameters:
    """The logical axes of every parameter, as a tree of the parameters' structure."""
    model = nnx.merge(graphdef, parameters)
    return nnx.to_pure_dict(
        jax.tree.map(
            lambda variable: variable.replace(LogicalAxes(variable.axes)),
            nnx.state(model),
            is_leaf=lambda node: isinstance(node, nnx.Variable),
        )
    )


def cache_axes(cache: Cache) -> Cache:
    """The logical axes of every array of a cache, as a tree of its structure."""
    return jax.tree_util.tree_map_with_path(lambda path, _: LogicalAxes(CACHE_AXES[path[-1].name]), cache)


def shardings(mesh: Mesh | AbstractMesh, axes: Any, arrays: Any) -> Any:
    """A `NamedSharding` for every array.

    Args:
        mesh: its axis names are among `MESH_AXES`; a missing one counts as size 1.
        axes: tree of `LogicalAxes`.
        arrays: tree of arrays, or of shapes and dtypes, with the same structure.

    Raises:
        ConfigError: an axis does not divide over its mesh axis; names the axis, its size and the mesh axis. Or the mesh
            has axes that are unknown, or that want sharding written into every operation.
    """
    unknown = set(mesh.axis_names) - set(MESH_AXES)
    if unknown:
        raise ConfigError(f"mesh: unknown axes {sorted(unknown)}; expected some of {list(MESH_AXES)}")
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        # `jax.make_mesh` makes Explicit axes where it is not told otherwise.
        raise ConfigError(
            f"mesh: its axes are {', '.join(str(kind) for kind in mesh.axis_types)}, expected Auto ones: "
            "jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * number_of_axes)"
        )

    def one(logical: LogicalAxes, array: jax.Array | jax.ShapeDtypeStruct) -> NamedSharding:
        return NamedSharding(mesh, partition(mesh, logical.names, array.shape))

    return jax.tree.map(one, axes, arrays, is_leaf=lambda node: isinstance(node, LogicalAxes))


def cache_shardings(mesh: Mesh | AbstractMesh, cache: Cache) -> Cache:
    """A `NamedSharding` for every array of a cache, cut as the parameters of the same heads are.

    An axis that does not divide over its mesh axis stays whole on every device and is not refused: a cache holds any
    number of rows.
    """
    axes = cache_axes(cache)
    return jax.tree.map(
        lambda logical, array: fitting_sharding(mesh, logical.names, array.shape),
        axes,
        cache,
        is_leaf=lambda node: isinstance(node, LogicalAxes),
    )


def fitting_sharding(
    mesh: Mesh | AbstractMesh, names: tuple[str, ...], shape: tuple[int, ...]
) -> NamedSharding:
    """The rules' sharding of one array, but whole along every axis that does not divide."""
    return NamedSharding(mesh, fitting_partition(mesh, names, shape))
