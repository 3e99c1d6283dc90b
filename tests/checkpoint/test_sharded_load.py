"""Loading onto several devices: every device gets its part straight from the files, and no more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.tiny_checkpoint import write_checkpoint

LOAD_ON_FOUR_DEVICES = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from qwen35_jax.checkpoint import streaming
from qwen35_jax.checkpoint.parameter_tree import leaf, parameter_leaves
from qwen35_jax.checkpoint.hf import load_hf
from qwen35_jax.checkpoint.export import export_hf
from qwen35_jax.checkpoint.orbax import load_orbax, save_orbax

devices = np.array(jax.devices())
assert len(devices) == 4
mesh = Mesh(devices.reshape(2, 2), ("a", "b"))
source, target, saved = sys.argv[1:]
_, whole, _ = load_hf(source, mtp=True)

def cut(array):
    # The first two axes that can be cut, one over each mesh axis, so that boxes start anywhere in a tensor.
    names, spec = ["a", "b"], []
    for size in array.shape:
        spec.append(names.pop() if names and size % 2 == 0 else None)
    return NamedSharding(mesh, P(*spec))

shardings = jax.tree.map(cut, whole)
quarters = sum(1 for s in jax.tree.leaves(shardings) if len([a for a in s.spec if a]) == 2)
assert quarters > 20, quarters

allocated = []
allocate = streaming.aligned_empty
def counting(shape, dtype):
    memory = allocate(shape, dtype)
    allocated.append(memory.nbytes)
    return memory
streaming.aligned_empty = counting

for options in ({}, {"parameter_dtype": "float32"}):
    _, expected, _ = load_hf(source, mtp=True, **options)
    allocated.clear()
    config, parameters, kept = load_hf(source, mtp=True, shardings=shardings, **options)
    for path, array in parameter_leaves(parameters):
        other = leaf(expected, path)
        assert array.sharding == leaf(shardings, path), path
        assert array.dtype == other.dtype, path
        assert (np.asarray(array) == np.asarray(other)).all(), path
    total = sum(x.nbytes for x in jax.tree.leaves(expected))
    assert sum(allocated) == total, (sum(allocated), total)  # every distinct box once, nothing else
    for device in devices:
        shards = [shard for x in jax.tree.leaves(parameters) for shard in x.addressable_shards]
        held = sum(shard.data.nbytes for shard in shards if shard.device == device)
        due = sum(x.nbytes // (4 if len([a for a in x.sharding.spec if a]) == 2 else 2 if any(x.sharding.spec) else 1)
                  for x in jax.tree.leaves(parameters))
        assert held == due

config, parameters, kept = load_hf(source, mtp=True, shardings=shardings)
export_hf(parameters, config, target, kept=kept)
save_orbax(parameters, config, saved, kept=kept)
_, again, _ = load_orbax(saved, mtp=True, shardings=shardings)
for path, array in parameter_leaves(again):
    other = leaf(parameters, path)
    assert array.sharding == other.sharding and array.dtype == other.dtype, path
    assert (np.asarray(array) == np.asarray(other)).all(), path
print("done")
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    write_checkpoint(folder, shards=2)
    return folder


def test_b57_four_devices_hold_their_boxes_and_export_the_same_file(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [str(source), str(out), str(tmp_path / "saved")]
    command = [sys.executable, "-c", LOAD_ON_FOUR_DEVICES, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "done", result.stderr
    for file in source.glob("*.safetensors"):
        assert (out / file.name).read_bytes() == file.read_bytes()
