"""TPU slices by name: what their chips can do, and their devices for a compiler that runs without them."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
from collections.abc import Mapping

import jax
from jax.experimental import mesh_utils
from jax.experimental import topologies as jax_topologies
from jax.sharding import AbstractMesh, AxisType, Mesh

from qwen35_jax.chips import CHIPS, Chip
from qwen35_jax.errors import ConfigError
from qwen35_jax.logical_axes import MESH_AXES
from qwen35_jax.planning.tpu_library import compiler_alone


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice.

    Attributes:
        name: e.g. `v5e:4x4`.
        shape: chips along each axis of its network.
        chip: what each is.
    """

    name: str
    shape: tuple[int, ...]
    chip: Chip

    @property
    def devices(self) -> int:
        return math.prod(self.shape)


def parse_topology(name: str) -> Topology:
    """Reads a name such as `v5e:4x4`; needs no TPU library.

    Raises:
        ConfigError: it is not of that form, or of a generation that is not in `CHIPS`.
    """
    found = re.fullmatch(r"(v\w+):(\d+(?:x\d+)+)", name)
    if found is None or found[1] not in CHIPS:
        raise ConfigError(
            f"topology is {name!r}, expected a generation of {', '.join(CHIPS)} and its chips, such as v5e:4x4 or "
            "v5p:4x4x4"
        )
    chip, shape = CHIPS[found[1]], tuple(map(int, found[2].split("x")))
    if len(shape) != chip.axes or not all(shape):
        raise ConfigError(
            f"topology is {name!r}, expected {chip.axes} sizes: the chips of a {found[1]} slice form a "
            f"{chip.axes}-dimensional torus"
        )
    return Topology(name, shape, chip)


def parse_mesh(text: str, topology: Topology) -> dict[str, int]:
    """Reads a mesh such as `fsdp=4,tensor=4` over all devices of a topology.

    Raises:
        ConfigError: an axis or a size is none, or the sizes make another number of devices.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in MESH_AXES or axis in sizes or not re.fullmatch(r"[1-9]\d*", size):
            raise ConfigError(
                f"mesh is {text!r}, expected sizes of some of {', '.join(MESH_AXES)}, each once, such as "
                "fsdp=4,tensor=4"
            )
        sizes[axis] = int(size)
    count = math.prod(sizes.values())
    if count != topology.devices:
        raise ConfigError(
            f"mesh is {text!r}, which makes {count} devices, expected the {topology.devices} of {topology.name}"
        )
    return sizes


def can_compile() -> bool:
    """Whether the TPU compiler is installed."""
    return importlib.util.find_spec("libtpu") is not None


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """A mesh without devices, on which the sharding rules can be tried."""
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def make_mesh(topology: Topology, sizes: Mapping[str, int]) -> Mesh:
    """A mesh of devices that are only known to the compiler.

    Loads the TPU compiler into this process; backends that are in use stay what they are.

    Raises:
        ConfigError: it is not installed, or knows no such slice.
    """
    if not can_compile():
        raise ConfigError(
            "a topology needs the TPU compiler, which is not installed: pip install 'qwen35-jax[tpu]' (Linux on "
            "x86-64; no TPU is needed)"
        )
    try:
        with compiler_alone():
            devices = jax_topologies.get_topology_desc(
                platform="tpu",
                topology_name=topology.name,
                chips_per_host_bounds=[2 - size % 2 for size in (*topology.shape, 1)[:3]],
                **({"chip_config_name": "megacore"} if topology.name.startswith("v4:") else {}),
            ).devices
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(
            f"topology is {topology.name!r}, which the TPU compiler does not take: {str(error).splitlines()[0]}"
        ) from error
    laid_out = mesh_utils.create_device_mesh(tuple(sizes.values()), devices, allow_split_physical_axes=True)
    return Mesh(laid_out, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
