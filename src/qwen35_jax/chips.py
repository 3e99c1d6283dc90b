"""What accelerators can do, by the figures of their makers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """The limits of one chip.

    Attributes:
        axes: of the network that joins the chips of a slice, a torus.
        flops: of bfloat16 products with float32 sums, a second.
        hbm_bytes: of its main memory.
        hbm_bandwidth: bytes a second.
        link_bandwidth: bytes a second that it sends over all its links to other chips.
    """

    axes: int
    flops: float
    hbm_bytes: int
    hbm_bandwidth: float
    link_bandwidth: float


CHIPS: Mapping[str, Chip] = {
    "v4": Chip(3, 2.75e14, 32 * GIB, 1.2e12, 6 * 4.5e10),
    "v5e": Chip(2, 1.97e14, 16 * GIB, 8.2e11, 4 * 4.5e10),
    "v5p": Chip(3, 4.59e14, 96 * GIB, 2.8e12, 6 * 9e10),
    "v6e": Chip(2, 9.2e14, 32 * GIB, 1.6e12, 4 * 9e10),
}
"""TPUs by generation. Source: Austin et al., "How to Scale Your Model" (2025), chapter "How to Think About TPUs"."""

_FLOPS: Mapping[str, float] = {
    "TPU v4": CHIPS["v4"].flops,
    "TPU v5 lite": CHIPS["v5e"].flops,
    "TPU v5e": CHIPS["v5e"].flops,
    "TPU v5": CHIPS["v5p"].flops,
    "TPU v5p": CHIPS["v5p"].flops,
    "TPU v6 lite": CHIPS["v6e"].flops,
    "TPU v6e": CHIPS["v6e"].flops,
    "NVIDIA A100": 3.12e14,
    "NVIDIA H100 PCIe": 7.56e14,
    "NVIDIA H100": 9.89e14,
    "NVIDIA H200": 9.89e14,
    "NVIDIA GH200": 9.89e14,
    "NVIDIA B200": 2.25e15,
}
"""Dense bfloat16 FLOPs a second, by the beginning of `jax.Device.device_kind`; GPUs' are from their data sheets."""


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOPs a second of a device, by its `device_kind`; None for one that is not in the table."""
    found = [
        name for name in _FLOPS if device_kind == name or device_kind.startswith((f"{name} ", f"{name}-"))
    ]
    return _FLOPS[max(found, key=len)] if found else None
