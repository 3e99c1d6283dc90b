"""The one table from logical axes to mesh axes.

Every parameter names its logical axes where it is made (`qwen35_jax.nn.parameter`), and every activation at the
boundaries of a block. Cutting a model over a mesh is a choice of rules, made here, after the model is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from qwen35_jax.errors import ConfigError

MESH_AXES = ("data", "fsdp", "sequence", "tensor")

# Heads are the unit of tensor parallelism: each device holds whole heads of every part (q, k, v, z, gate), its part
# of the convolution and of the memory, and one sum over `tensor` follows out_proj, o_proj and down. The residual
# width of the weights is cut over `fsdp` and gathered for use, and so rows are cut over it as well: devices that hold
# different parts of a weight work on different rows. Norms and per-head gates follow the axis that they scale. Long
# sequences are cut over `sequence`, see `qwen35_jax.ops.sequence_parallel`.
RULES: Mapping[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "key_heads": ("tensor",),
    "value_heads": ("tensor",),
    "mlp": ("tensor",),
    "repeats": (),
    "rank": (),
    "head_dim": (),
    "key_dim": (),
    "value_dim": (),
    "kernel": (),
    "window": (),
    "capacity": (),
    "mtp_embed": (),
    "mtp_part": (),
    "time": ("sequence",),
    "residual": (),
}

# Heads that several others share: where there are fewer of them than shards, every shard keeps them all.
SHARED_HEADS = frozenset({"kv_heads", "key_heads"})


def mesh_axes(mesh: Mesh | AbstractMesh, name: str) -> tuple[str, ...]:
    """The axes of this mesh over which a logical axis is cut."""
    return tuple(axis for axis in RULES[name] if mesh.shape.get(axis, 1) > 1)


def shards(mesh: Mesh | AbstractMesh, name: str) -> int:
    """Into how many parts a logical axis is cut."""
    return math.prod(mesh.shape[axis] for axis in mesh_axes(mesh, name))


def partition(mesh: Mesh | AbstractMesh, names: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
    """How the rules cut an array.

    Raises:
        ConfigError: an axis does not divide over its mesh axes; names the axis, its size and the mesh axes.
    """

    def one(name: str, size: int) -> tuple[str, ...]:
        axes, parts = mesh_axes(mesh, name), shards(mesh, name)
        if name in SHARED_HEADS and size < parts and parts % size == 0:
            return ()
        if size % parts:
            over = " and ".join(f"'{axis}'" for axis in axes)
            raise ConfigError(
                f"mesh: {size} {name} do not divide over {parts} devices of mesh axis {over}; "
                f"choose a size of {over} that divides {size}"
            )
        return axes

    return _spec(map(one, names, shape))


def fitting_partition(
    mesh: Mesh | AbstractMesh, names: tuple[str, ...], shape: tuple[int, ...]
) -> PartitionSpec:
    """How the rules cut an array, but whole along every axis that does not divide."""

    def one(name: str, size: int) -> tuple[str, ...]:
        return () if size % shards(mesh, name) else mesh_axes(mesh, name)

    return _spec(map(one, names, shape))


def time_axis() -> str | None:
    """Inside a program that runs under `jax.set_mesh`: the mesh axis over which sequences are cut, if they are."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = () if mesh.empty else mesh_axes(mesh, "time")
    return axes[0] if axes else None


def over_devices() -> bool:
    """Inside a program that runs under `jax.set_mesh`: whether the mesh has several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1


def shards_in_program(name: str, size: int) -> int:
    """Inside a program that runs under `jax.set_mesh`: into how many parts `constrained` cuts an axis of this size."""
    mesh = jax.sharding.get_abstract_mesh()
    parts = 1 if mesh.empty else shards(mesh, name)
    return 1 if size % parts else parts


def constrained(x: Shaped[Array, "..."], *names: str) -> Shaped[Array, "..."]:
    """Inside a program that runs under `jax.set_mesh`: `x`, cut as the rules say. Elsewhere it does nothing.

    Said at the boundaries of a block, it keeps the compiler from choosing another way of its own, which it does where
    a product leaves it the choice.
    """
    if not over_devices():
        return x
    mesh = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, fitting_partition(mesh, names, x.shape)))


def _spec(axes: Iterable[tuple[str, ...]]) -> PartitionSpec:
    """One mesh axis by itself is written without a tuple, as JAX writes it."""
    return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in axes))
