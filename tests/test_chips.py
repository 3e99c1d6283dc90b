"""The speed of a device is found by the name that JAX has for it."""

from __future__ import annotations

import pytest

from qwen35_jax.chips import CHIPS, peak_flops


@pytest.mark.parametrize(
    ("device_kind", "flops"),
    [
        ("TPU v5 lite", CHIPS["v5e"].flops),
        ("TPU v5", CHIPS["v5p"].flops),
        ("TPU v6 lite", CHIPS["v6e"].flops),
        ("NVIDIA H100 80GB HBM3", 9.89e14),
        ("NVIDIA H100 PCIe", 7.56e14),
        ("NVIDIA A100-SXM4-80GB", 3.12e14),
        ("NVIDIA H2000", None),
        ("cpu", None),
    ],
)
def test_a_device_is_known_by_the_longest_name_that_begins_its_own(
    device_kind: str, flops: float | None
) -> None:
    assert peak_flops(device_kind) == flops
