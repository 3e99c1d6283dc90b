"""The one table from logical axes to mesh axes.

Every parameter names its logical axes where it is made (`qwen35_jax.nn.parameter`). Cutting a model over a mesh is a
choice of rules, made here, after the model is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from qwen35_jax.cache import Cache
from qwen35_jax.errors import ConfigError
from qwen35_jax.model import Parameters

MESH_AXES = ("data", "fsdp", "tensor")

# Heads are the unit of tensor parallelism: each device holds whole heads of every part (q, k, v, z, gate), its part
# of the convolution and of the memory, and one sum over `tensor` follows out_proj, o_proj and down. The residual
# width is cut over `fsdp` and gathered for use. Norms and per-head gates follow the axis that they scale.
RULES: Mapping[str, str | None] = {
    "batch": "data",
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "key_heads": "tensor",
    "value_heads": "tensor",
    "mlp": "tensor",
    "repeats": None,
    "head_dim": None,
    "key_dim": None,
    "value_dim": None,
    "kernel": None,
    "window": None,
    "capacity": None,
    "mtp_embed": None,
    "mtp_part": None,
}

# Heads that several others share: where there are fewer of them than shards, every shard keeps them all.
SHARED_HEADS = frozenset({"kv_heads", "key_heads"})


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
        return NamedSharding(mesh, _partition(mesh, logical.names, array.shape))

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
    return NamedSharding(
        mesh,
        PartitionSpec(
            *(
                RULES[name] if (shards := _shards(mesh, name)) > 1 and size % shards == 0 else None
                for name, size in zip(names, shape, strict=True)
            )
        ),
    )


def _shards(mesh: Mesh | AbstractMesh, name: str) -> int:
    """Over how many devices an axis is to be cut."""
    mesh_axis = RULES[name]
    return mesh.shape.get(mesh_axis, 1) if mesh_axis else 1


def _partition(mesh: Mesh | AbstractMesh, names: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
    partition = []
    for name, size in zip(names, shape, strict=True):
        mesh_axis = RULES[name]
        shards = _shards(mesh, name)
        if shards == 1 or (name in SHARED_HEADS and size < shards and shards % size == 0):
            partition.append(None)
        elif size % shards:
            raise ConfigError(
                f"mesh: {size} {name} do not divide over {shards} devices of mesh axis '{mesh_axis}'; "
                f"choose a size of '{mesh_axis}' that divides {size}"
            )
        else:
            partition.append(mesh_axis)
    return PartitionSpec(*partition)
