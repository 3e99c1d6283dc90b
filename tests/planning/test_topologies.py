"""Names of slices and meshes are read, and refused in one line, without the TPU compiler."""

from __future__ import annotations

import jax
import pytest

from qwen35_jax.chips import CHIPS
from qwen35_jax.errors import ConfigError
from qwen35_jax.planning import topologies
from qwen35_jax.planning.topologies import make_mesh, parse_mesh, parse_topology


@pytest.mark.parametrize(
    ("name", "shape", "devices"),
    [
        ("v5e:4x4", (4, 4), 16),
        ("v5p:4x4x4", (4, 4, 4), 64),
        ("v6e:2x4", (2, 4), 8),
        ("v4:2x2x1", (2, 2, 1), 4),
    ],
)
def test_a_slice_has_the_chips_of_its_name(name, shape, devices):
    topology = parse_topology(name)
    assert topology.shape == shape
    assert topology.devices == devices
    assert topology.chip is CHIPS[name.split(":")[0]]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("v5e", "such as v5e:4x4"),
        ("h100:8", "expected a generation of v4, v5e, v5p, v6e"),
        ("v9x:4x4", "expected a generation"),
        ("v5e:4x4x4", "expected 2 sizes"),
        ("v5p:4x4", "expected 3 sizes"),
        ("v5e:0x4", "expected 2 sizes"),
    ],
)
def test_another_name_is_refused_and_what_is_expected_told(name, told):
    with pytest.raises(ConfigError, match=told):
        parse_topology(name)


def test_a_mesh_over_all_devices_is_read():
    assert parse_mesh("fsdp=4, tensor=2,sequence=2", parse_topology("v5e:4x4")) == {
        "fsdp": 4,
        "tensor": 2,
        "sequence": 2,
    }


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("fsdp=4,tensor=2", "makes 8 devices, expected the 16 of v5e:4x4"),
        ("fsdp=4,fsdp=4", "each once"),
        ("rows=16", "expected sizes of some of data, fsdp, sequence, tensor"),
        ("fsdp=-16", "expected sizes"),
        ("fsdp", "expected sizes"),
    ],
)
def test_another_mesh_is_refused_and_what_is_expected_told(text, told):
    with pytest.raises(ConfigError, match=told):
        parse_mesh(text, parse_topology("v5e:4x4"))


def test_a_slice_that_the_compiler_does_not_take_is_refused_in_one_line(monkeypatch):
    def refuse(**arguments):
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: no such slice\nand much more")

    monkeypatch.setattr(topologies, "can_compile", lambda: True)
    monkeypatch.setattr(topologies.jax_topologies, "get_topology_desc", refuse)
    with pytest.raises(ConfigError) as refused:
        make_mesh(parse_topology("v5e:3x5"), {"data": 15})
    expected = "topology is 'v5e:3x5', which the TPU compiler does not take: INVALID_ARGUMENT: no such slice"
    assert str(refused.value) == expected


def test_without_the_compiler_a_mesh_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr(topologies, "can_compile", lambda: False)
    with pytest.raises(ConfigError, match=r"pip install 'qwen35-jax\[tpu\]'"):
        make_mesh(parse_topology("v5e:2x2"), {"data": 4})
