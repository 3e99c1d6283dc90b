"""The meshes that are chosen where none is named."""

from __future__ import annotations

import pytest

from qwen35_jax.config import published
from qwen35_jax.planning.inference_plan import inference_mesh
from qwen35_jax.planning.topologies import parse_topology
from qwen35_jax.planning.train_plan import training_mesh


@pytest.mark.parametrize(
    ("model", "slice_name", "mesh"),
    [
        ("Qwen/Qwen3.5-4B", "v5e:4x4", {"tensor": 16}),
        ("Qwen/Qwen3.5-0.8B", "v5e:4x4", {"data": 2, "tensor": 8}),  # it has 8 attention heads
        ("Qwen/Qwen3.8-27B", "v5p:4x4x4", {"data": 8, "tensor": 8}),  # and this one 24
        ("Qwen/Qwen3.5-0.8B", "v5e:1x3", {"data": 3}),
        ("Qwen/Qwen3.5-0.8B", "v5e:1x1", {"data": 1}),
    ],
)
def test_answering_cuts_heads_over_as_many_devices_as_divide_them(model, slice_name, mesh):
    assert inference_mesh(published(model), parse_topology(slice_name)) == mesh


@pytest.mark.parametrize(
    ("model", "slice_name", "mesh"),
    [
        ("Qwen/Qwen3.5-4B", "v5e:4x4", {"fsdp": 16}),
        ("Qwen/Qwen3.8-27B", "v5p:4x4x4", {"fsdp": 32, "tensor": 2}),  # 160 of its 5,120 channels a device
        ("Qwen/Qwen3.5-0.8B", "v5e:4x8", {"fsdp": 8, "tensor": 4}),
        ("Qwen/Qwen3.5-0.8B", "v5e:8x16", {"data": 16, "fsdp": 8}),  # it has 8 attention heads
        ("Qwen/Qwen3.5-0.8B", "v5e:1x1", {"fsdp": 1}),
    ],
)
def test_training_cuts_rows_and_weights_over_as_many_devices_as_get_whole_lanes(model, slice_name, mesh):
    assert training_mesh(published(model), parse_topology(slice_name)) == mesh
