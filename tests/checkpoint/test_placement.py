"""Shardings that are not those of the parameters are refused by path, and nothing is read before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from qwen35_jax.checkpoint.hf import load_hf
from qwen35_jax.checkpoint.orbax import convert_to_orbax, load_orbax
from qwen35_jax.checkpoint.placement import check_shardings
from qwen35_jax.checkpoint.safetensors_file import StoredTensor
from qwen35_jax.errors import CheckpointError
from tests.checkpoint.tiny_checkpoint import write_checkpoint

LAYERS = "decoder.groups.0.layers"
ONE = SingleDeviceSharding(jax.devices()[0])


def _without_norm(tree: dict) -> dict:
    del tree["final_norm"]
    return tree


def _with_extra(tree: dict) -> dict:
    tree["decoder"]["groups"][0]["layers"][0]["mixer"]["bias"] = ONE
    return tree


def _one_for_a_layer(tree: dict) -> dict:
    tree["decoder"]["groups"][0]["layers"][2] = ONE
    return tree


def _list_of_layers(tree: dict) -> dict:
    group = tree["decoder"]["groups"][0]
    group["layers"] = list(group["layers"].values())
    return tree


def _text_keys(tree: dict) -> dict:
    tree["decoder"]["groups"] = {"0": tree["decoder"]["groups"][0]}
    return tree


def _specification_alone(tree: dict) -> dict:
    tree["embed_tokens"]["weight"] = PartitionSpec("tensor")
    return tree


def _none(tree: dict) -> dict:
    tree["embed_tokens"]["weight"] = None
    return tree


def _too_many_axes(tree: dict) -> dict:
    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    tree["final_norm"]["weight"] = NamedSharding(mesh, PartitionSpec(None, "tensor"))
    return tree


WRONG: dict[str, tuple[Callable[[dict], Any], str]] = {
    "missing leaf": (_without_norm, r"'final_norm\.weight': missing"),
    "extra leaf": (
        _with_extra,
        rf"'{LAYERS}\.0\.mixer\.bias': found a SingleDeviceSharding.*no such parameter",
    ),
    "leaf for a branch": (
        _one_for_a_layer,
        rf"'{LAYERS}\.2': found a SingleDeviceSharding.*dictionary of several",
    ),
    "list for a branch": (_list_of_layers, rf"'{LAYERS}': found a list.*dictionary of several"),
    "text keys": (_text_keys, rf"'{LAYERS}\..*whole numbers as keys"),
    "no sharding": (
        _specification_alone,
        r"'embed_tokens\.weight': found a PartitionSpec without a mesh, expected a jax",
    ),
    "None": (_none, r"'embed_tokens\.weight': found None, expected a jax"),
    "too many axes": (_too_many_axes, r"'final_norm\.weight': cannot cut the parameter's shape \[20\]"),
    "one for all": (lambda tree: ONE, r"found a SingleDeviceSharding, expected a nested dictionary"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("shardings")
    write_checkpoint(folder / "hf")
    convert_to_orbax(folder / "hf", folder / "orbax")
    return {"hf": folder / "hf", "orbax": folder / "orbax"}


@pytest.fixture(scope="module")
def shardings(folders: dict[str, Path]) -> dict[str, Any]:
    return jax.tree.map(lambda array: ONE, load_hf(folders["hf"])[1])


@pytest.mark.parametrize("layout", ["hf", "orbax"])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_shardings_are_refused_by_path_before_anything_is_read(
    folders: dict[str, Path],
    shardings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    layout: str,
) -> None:
    def read(*arguments: object, **options: object) -> None:
        raise AssertionError("bytes of a tensor are read")

    monkeypatch.setattr(StoredTensor, "read_bytes_into", read)
    monkeypatch.setattr("qwen35_jax.checkpoint.orbax._restore_tree", read)
    spoil, message = WRONG[case]
    load = {"hf": load_hf, "orbax": load_orbax}[layout]
    with pytest.raises(CheckpointError, match=f"^shardings: {message}") as raised:
        load(folders[layout], shardings=spoil(jax.tree.map(lambda each: each, shardings)))
    assert "\n" not in str(raised.value)


def test_axis_that_does_not_divide_is_refused_by_path() -> None:
    mesh = jax.sharding.AbstractMesh((3,), ("tensor",))
    tree = {"embed_tokens": {"weight": NamedSharding(mesh, PartitionSpec("tensor"))}}
    with pytest.raises(CheckpointError, match=r"'embed_tokens\.weight': cannot cut .* \[29, 20\]: .*3"):
        check_shardings(tree, {("embed_tokens", "weight"): (29, 20)}, to_device=True)
    check_shardings(tree, {("embed_tokens", "weight"): (30, 20)}, to_device=True)


@pytest.mark.parametrize("load", [load_hf, load_orbax])
def test_shardings_for_arrays_on_the_host_are_refused(
    folders: dict[str, Path], shardings: dict[str, Any], load: Callable
) -> None:
    layout = "hf" if load is load_hf else "orbax"
    with pytest.raises(CheckpointError, match="to_device=False"):
        load(folders[layout], shardings=shardings, to_device=False)


@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("unroll_layers", [False, True])
def test_shardings_of_the_parameters_as_they_are_loaded_are_taken(
    folders: dict[str, Path], unroll_layers: bool, mtp: bool
) -> None:
    options = {"unroll_layers": unroll_layers, "mtp": mtp}
    tree = jax.tree.map(lambda array: ONE, load_hf(folders["hf"], **options)[1])
    for load, layout in ((load_hf, "hf"), (load_orbax, "orbax")):
        _, parameters, _ = load(folders[layout], shardings=tree, **options)
        assert jax.tree.structure(parameters) == jax.tree.structure(tree)
    other = {**options, "unroll_layers": not unroll_layers}
    with pytest.raises(CheckpointError, match=r"^shardings: 'decoder\."):
        load_hf(folders["hf"], shardings=tree, **other)
