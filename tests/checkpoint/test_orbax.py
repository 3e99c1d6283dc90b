"""Orbax folders: nothing of a Hugging Face checkpoint is lost on the way there and back."""

from __future__ import annotations

import contextlib
import filecmp
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from qwen35_jax.checkpoint import orbax
from qwen35_jax.checkpoint.export import export_hf
from qwen35_jax.checkpoint.hf import load_hf
from qwen35_jax.checkpoint.orbax import convert_to_orbax, holds_mtp, load_orbax, save_orbax
from qwen35_jax.checkpoint.parameter_tree import leaf, parameter_leaves
from qwen35_jax.checkpoint.source import export
from qwen35_jax.errors import CheckpointError
from tests.checkpoint.tiny_checkpoint import (
    MOTIF,
    assert_same_parameters,
    read_tensors,
    same_bytes,
    write_checkpoint,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    write_checkpoint(folder, shards=2)
    return folder


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("orbax") / "converted"
    convert_to_orbax(source, folder)
    return folder


def test_converted_parameters_are_those_of_the_source(source: Path, converted: Path) -> None:
    config, parameters, kept = load_orbax(converted)
    expected_config, expected, expected_kept = load_hf(source)
    assert config == expected_config
    assert_same_parameters(parameters, expected)
    assert all(isinstance(array, jax.Array) for array in jax.tree.leaves(parameters))
    assert kept is not None
    assert kept.layout == expected_kept.layout
    assert kept.tensors.keys() == expected_kept.tensors.keys()


def test_orbax_alone_reads_the_parameters(source: Path, converted: Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(converted / "params")
    mixer = tree["decoder"]["groups"]["0"]["layers"]["3"]["mixer"]
    expected = load_hf(source)[1]["decoder"]["groups"][0]["layers"][3]["mixer"]
    assert same_bytes(np.asarray(mixer["gate_weight"]), np.asarray(expected["gate_weight"]))


def test_b44_export_writes_the_files_of_the_source_again(
    source: Path, converted: Path, tmp_path: Path
) -> None:
    export(converted, tmp_path / "out")
    names = sorted(path.name for path in source.iterdir())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert filecmp.cmpfiles(source, tmp_path / "out", names, shallow=False)[0] == names


def test_b46_converting_an_export_gives_the_same_again(source: Path, converted: Path, tmp_path: Path) -> None:
    export(converted, tmp_path / "out")
    convert_to_orbax(tmp_path / "out", tmp_path / "again")
    assert_same_parameters(load_orbax(tmp_path / "again", mtp=True)[1], load_orbax(converted, mtp=True)[1])


def test_kept_mtp_head_becomes_parameters_on_request(source: Path, converted: Path, tmp_path: Path) -> None:
    config, parameters, kept = load_orbax(converted, mtp=True)
    assert_same_parameters(parameters, load_hf(source, mtp=True)[1])
    assert kept is not None
    assert not [name for name in kept.tensors if name.startswith("mtp.")]
    # Saved as parameters, it is still exported under its own names.
    save_orbax(parameters, config, tmp_path / "with_head", kept=kept)
    assert holds_mtp(tmp_path / "with_head")
    assert_same_parameters(load_orbax(tmp_path / "with_head", mtp=True)[1], parameters)
    export(tmp_path / "with_head", tmp_path / "out")
    expected, found = read_tensors(source), read_tensors(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(same_bytes(found[name], expected[name]) for name in expected)


def test_b22_gate_parameters_are_never_narrowed(converted: Path, source: Path) -> None:
    _, parameters, _ = load_orbax(converted, parameter_dtype="float16")
    _, exact, _ = load_hf(source)
    for path, array in parameter_leaves(parameters):
        narrow = path[-1] not in ("A_log", "dt_bias", "norm_weight")
        assert array.dtype == (jnp.float16 if narrow else jnp.float32), path
        if not narrow:
            assert (np.asarray(array) == np.asarray(leaf(exact, path), np.float32)).all()


def test_trained_parameters_without_a_source_are_saved_and_exported(tmp_path: Path, source: Path) -> None:
    config, parameters, _ = load_hf(source)
    save_orbax(parameters, config, tmp_path / "trained")
    loaded_config, loaded, kept = load_orbax(tmp_path / "trained")
    assert kept is None
    assert loaded_config.text.mtp_num_hidden_layers == 0  # the head was not saved, so it is not announced
    assert_same_parameters(loaded, parameters)
    export_hf(loaded, loaded_config, tmp_path / "out", kept=kept)
    assert_same_parameters(load_hf(tmp_path / "out")[1], parameters)
    with pytest.raises(CheckpointError, match="holds none"):
        load_orbax(tmp_path / "trained", mtp=True)


def test_float64_is_saved_as_it_is(tmp_path: Path, source: Path) -> None:
    config, parameters, _ = load_hf(source, to_device=False)
    parameters = jax.tree.map(lambda array: array.astype(np.float64) + 1e-12, parameters)
    save_orbax(parameters, config, tmp_path / "double")
    assert_same_parameters(load_orbax(tmp_path / "double", to_device=False)[1], parameters)


def test_checkpoint_for_another_config_is_refused_by_name(converted: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(converted, broken)
    config = json.loads((broken / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 48
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"mlp\.gate_weight' has shape \[2, 44, 20\].*\[2, 48, 20\]"):
        load_orbax(broken)
    config["text_config"] |= {"intermediate_size": 44, "num_hidden_layers": 4}
    config["text_config"]["layer_types"] = config["text_config"]["layer_types"][2:6]
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"parameter 'decoder\..*(missing|has shape|belongs to no part)"
    ):
        load_orbax(broken)


def test_incomplete_orbax_folder_is_refused_by_name(converted: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(converted, broken)
    (broken / "params" / "_METADATA").unlink()
    with pytest.raises(CheckpointError, match=r"params: is not a complete Orbax checkpoint"):
        load_orbax(broken)


@pytest.mark.parametrize(
    "tree",
    [{"final_norm": np.zeros(3)}, {"final_norm": {"weight": [np.zeros(20)]}}, {"final_norm": {"weight": 3}}],
    ids=["leaf for a branch", "list", "number"],
)
def test_orbax_folder_of_something_else_is_refused(converted: Path, tmp_path: Path, tree: dict) -> None:
    other = tmp_path / "other"
    shutil.copytree(converted, other)
    shutil.rmtree(other / "params")
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(other / "params", tree)
    with pytest.raises(CheckpointError, match="other") as raised:
        load_orbax(other)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("damage", ["removed", "truncated"])
def test_damaged_values_are_refused_by_the_name_of_the_folder(
    converted: Path, tmp_path: Path, damage: str
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(converted, broken)
    largest = max(broken.glob("params/**/d/*"), key=lambda path: path.stat().st_size)
    if damage == "removed":
        largest.unlink()
    else:
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"broken/params: cannot be restored"):
        load_orbax(broken)


def test_kept_tensors_that_are_gone_are_refused(converted: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(converted, broken)
    (broken / "kept.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"kept\.safetensors: cannot be read"):
        load_orbax(broken)


SHARD = "model-00001-of-00002.safetensors"


def _renamed(name: str) -> Callable[[dict], dict]:
    return lambda layout: layout | {"headers": {name: layout["headers"][SHARD]}}


DAMAGED: dict[str, tuple[Callable[[dict], Any], str]] = {
    "empty": (lambda layout: {}, "is damaged"),
    "list": (lambda layout: [1], "is damaged"),
    "no headers": (lambda layout: layout | {"headers": {}}, "headers are no texts"),
    "headers of numbers": (lambda layout: layout | {"headers": {SHARD: 1}}, "headers are no texts"),
    "header that is none": (lambda layout: layout | {"headers": {SHARD: "{"}}, "not valid JSON"),
    "config that is none": (lambda layout: layout | {"config": "{"}, "not valid JSON"),
    "index that is no text": (lambda layout: layout | {"index": 3}, "no text"),
    "kept that is no list": (lambda layout: layout | {"kept": 3}, "kept is no list"),
    "file above the folder": (_renamed("../../evil.safetensors"), "does not name a file inside the folder"),
    "file anywhere": (_renamed("/tmp/evil.safetensors"), "does not name a file inside the folder"),
    "file over another": (_renamed("config.json"), "is not a .safetensors file"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_layout_is_refused_by_name_and_writes_nothing(
    converted: Path, tmp_path: Path, case: str
) -> None:
    """The names in it are those of files that an export writes, and the folder may come from anyone."""
    broken = tmp_path / "broken"
    shutil.copytree(converted, broken)
    damage, message = DAMAGED[case]
    layout = json.loads((broken / "source_layout.json").read_text())
    (broken / "source_layout.json").write_text(json.dumps(damage(layout)))
    with pytest.raises(CheckpointError, match=rf"source_layout\.json: .*{message}"):
        export(broken, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_layout_that_would_turn_parameters_into_whole_numbers_is_refused(
    converted: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(converted, broken)
    layout = (broken / "source_layout.json").read_text()
    (broken / "source_layout.json").write_text(layout.replace("BF16", "I16"))
    with pytest.raises(CheckpointError, match=r"embed_tokens.*layout says int16"):
        export(broken, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_parameters_that_are_no_real_numbers_are_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, parameters, _ = load_hf(source, to_device=False)
    parameters["final_norm"]["weight"] = parameters["final_norm"]["weight"].astype(np.int8)
    with pytest.raises(CheckpointError, match=r"'final_norm\.weight': found int8"):
        save_orbax(parameters, config, tmp_path / "saved")
    monkeypatch.setattr(orbax, "check_parameters", lambda parameters, config: None)
    save_orbax(parameters, config, tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"'final_norm\.weight' is int8, expected float16"):
        load_orbax(tmp_path / "saved")


def test_error_in_the_middle_leaves_nothing_behind(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise ValueError("Error writing: No space left on device")  # as TensorStore says it

    monkeypatch.setattr(orbax, "_save_tree", fail)
    with pytest.raises(CheckpointError, match="the disk is full; nothing was written"):
        convert_to_orbax(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_unrolled_parameters_are_saved_stacked_and_come_back_in_either_way(
    source: Path, tmp_path: Path
) -> None:
    kinds = ["full_attention", *MOTIF, *MOTIF, "linear_attention"]
    write_checkpoint(tmp_path / "irregular", layer_types=kinds)
    for number, folder in enumerate((source, tmp_path / "irregular")):
        config, unrolled, kept = load_hf(folder, unroll_layers=True, mtp=True)
        saved = tmp_path / f"saved{number}"
        save_orbax(unrolled, config, saved, kept=kept)
        for unroll_layers in (False, True):
            options = {"mtp": True, "unroll_layers": unroll_layers}
            found_config, found, _ = load_orbax(saved, **options)
            expected_config, expected, _ = load_hf(folder, **options)
            assert found_config == expected_config
            assert_same_parameters(found, expected)
            assert all(isinstance(array, jax.Array) for array in jax.tree.leaves(found))


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("unroll_layers", [False, True])
def test_progress_passes_every_parameter_and_ends_at_the_whole(
    converted: Path, placed: bool, unroll_layers: bool
) -> None:
    _, expected, _ = load_orbax(converted, unroll_layers=unroll_layers)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    steps: list[int] = []
    totals: list[int] = []

    @contextlib.contextmanager
    def progress(title: str, nbytes: int) -> Iterator[Callable[[int], None]]:
        totals.append(nbytes)
        yield steps.append

    shardings = jax.tree.map(lambda array: one, expected) if placed else None
    load_orbax(converted, unroll_layers=unroll_layers, shardings=shardings, progress=progress)
    stacked = jax.tree.leaves(load_orbax(converted)[1])
    assert totals == [sum(steps)]
    assert sorted(steps) == sorted(array.nbytes for array in stacked)


@pytest.mark.parametrize(
    "error", [ValueError("OUT_OF_RANGE: no room\nstack"), RuntimeError("loop is closed")]
)
def test_a_write_that_fails_in_orbax_is_one_line_and_leaves_nothing(source, tmp_path, monkeypatch, error):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("orbax.checkpoint.Checkpointer.save", fail)
    with pytest.raises(
        CheckpointError, match=r"cannot be written: (OUT_OF_RANGE: no room|loop is closed); nothing"
    ):
        convert_to_orbax(source, tmp_path / "converted")
    assert not list(tmp_path.iterdir())


def test_kept_tensors_without_their_layout_are_refused_and_not_dropped(converted, tmp_path):
    broken = Path(shutil.copytree(converted, tmp_path / "broken"))
    (broken / "source_layout.json").unlink()
    with pytest.raises(CheckpointError, match=r"has kept\.safetensors without source_layout\.json"):
        load_orbax(broken)
