"""The index of a sharded checkpoint is believed only as far as the shards agree, and never leads out of the folder."""

from __future__ import annotations

import builtins
import json
import os
from pathlib import Path
from typing import Any

import pytest

from qwen35_jax.checkpoint.hf import load_hf, open_hf
from qwen35_jax.checkpoint.index import INDEX_FILE, open_weight_files
from qwen35_jax.errors import CheckpointError, Qwen35Error
from tests.checkpoint.tiny_checkpoint import write_checkpoint


def rewrite_index(folder: Path, change: Any) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    change(index["weight_map"])
    (folder / INDEX_FILE).write_text(json.dumps(index))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "model", shards=3)
    return tmp_path / "model"


def test_every_tensor_of_every_shard_is_found(sharded: Path) -> None:
    weights = open_weight_files(sharded)
    assert len(weights.files) == 3
    assert sorted(weights.tensors) == sorted(json.loads((sharded / INDEX_FILE).read_text())["weight_map"])


def test_b54_missing_shard_is_refused_by_name(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: is missing"):
        open_hf(sharded, mtp=False)


def test_b54_shard_one_byte_short_is_refused_by_name(sharded: Path) -> None:
    shard = sharded / "model-00003-of-00003.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.safetensors: is truncated"):
        open_hf(sharded, mtp=False)


def test_b54_tensor_dropped_from_the_index_is_refused_by_name(sharded: Path) -> None:
    name = "model.language_model.layers.5.mlp.up_proj.weight"
    rewrite_index(sharded, lambda weight_map: weight_map.pop(name))
    with pytest.raises(CheckpointError, match=f"holds tensor '{name}'"):
        open_hf(sharded, mtp=False)


def test_tensor_that_its_shard_does_not_hold_is_refused_by_name(sharded: Path) -> None:
    rewrite_index(sharded, lambda weight_map: weight_map.update(ghost="model-00001-of-00003.safetensors"))
    with pytest.raises(CheckpointError, match="does not hold tensor 'ghost'"):
        open_weight_files(sharded)


def test_tensor_in_two_shards_is_refused_by_name(sharded: Path, tmp_path: Path) -> None:
    shards = sorted(sharded.glob("*.safetensors"))
    shards[0].write_bytes(shards[1].read_bytes())
    with pytest.raises(CheckpointError, match=r"holds tensor .*, which .* places in|does not hold tensor"):
        open_weight_files(sharded)


def test_b56_duplicate_key_in_weight_map_is_refused(sharded: Path) -> None:
    text = (sharded / INDEX_FILE).read_text()
    doubled = text.replace('"weight_map": {', '"weight_map": {"lm_head.weight": "x.safetensors", ')
    (sharded / INDEX_FILE).write_text(doubled)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: given twice"):
        open_weight_files(sharded)


@pytest.mark.parametrize(
    "shard",
    [
        "../x.safetensors",
        "/abs/x.safetensors",
        "sub/../../x.safetensors",
        "sub/../model-00001-of-00003.safetensors",
        "..",
        "",
        "sub\\..\\..\\x.safetensors",
        "x\0.safetensors",
        "config.json",
        "link.safetensors",
        "linked_folder/x.safetensors",
        "loop.safetensors",
        7,
        None,
        ["model-00001-of-00003.safetensors"],
    ],
)
def test_b55_shard_outside_the_folder_is_refused_with_no_file_opened(
    sharded: Path, tmp_path: Path, shard: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x.safetensors").write_bytes((sharded / "model-00001-of-00003.safetensors").read_bytes())
    (sharded / "sub").mkdir()
    (sharded / "link.safetensors").symlink_to(outside / "x.safetensors")
    (sharded / "linked_folder").symlink_to(outside)
    (sharded / "loop.safetensors").symlink_to(sharded / "loop.safetensors")
    rewrite_index(sharded, lambda weight_map: weight_map.update({"lm_head.weight": shard}))

    opened: list[str] = []
    real_open, real_os_open = builtins.open, os.open
    monkeypatch.setattr(
        builtins, "open", lambda file, *a, **k: (opened.append(str(file)), real_open(file, *a, **k))[1]
    )
    monkeypatch.setattr(
        os, "open", lambda file, *a, **k: (opened.append(str(file)), real_os_open(file, *a, **k))[1]
    )
    with pytest.raises(CheckpointError):
        open_weight_files(sharded)
    assert not [file for file in opened if file.endswith(".safetensors")]


def test_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    """The cache keeps files in blobs/ and links to them from snapshots/<revision>/."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123abc"
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    write_checkpoint(snapshot, shards=2)
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / f"hash{number}")
        file.symlink_to(Path("..") / ".." / "blobs" / f"hash{number}")
    assert len(open_weight_files(snapshot).files) == 2
    (blobs.parent / "secret.safetensors").write_bytes((blobs / "hash3").read_bytes())
    shard = next(snapshot.glob("*.safetensors"))
    shard.unlink()
    shard.symlink_to(blobs.parent / "secret.safetensors")
    with pytest.raises(CheckpointError, match="outside the model's folder"):
        open_weight_files(snapshot)


def test_single_file_and_index_at_once_are_refused(sharded: Path) -> None:
    (sharded / "model.safetensors").write_bytes((sharded / "model-00001-of-00003.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="holds both"):
        open_weight_files(sharded)


def test_folder_without_weights_says_what_it_holds_instead(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no weights: expected model\.safetensors.*pytorch_model\.bin"):
        open_weight_files(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', "\xff"])
def test_malformed_index_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        open_weight_files(tmp_path)


@pytest.mark.parametrize("file", ["model.safetensors", "model.safetensors.index.json", "config.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path, file: str, kind: str) -> None:
    write_checkpoint(tmp_path, shards=2 if "index" in file else 1)
    (tmp_path / file).unlink()
    if kind == "pipe":
        os.mkfifo(tmp_path / file)
    else:
        (tmp_path / file).mkdir()
    with pytest.raises(Qwen35Error, match=rf"{file}: cannot be read.*not a regular file"):
        load_hf(tmp_path)


@pytest.mark.parametrize("file", ["model.safetensors", "model.safetensors.index.json"])
def test_link_to_nothing_is_named(tmp_path: Path, file: str) -> None:
    write_checkpoint(tmp_path, shards=2 if "index" in file else 1)
    (tmp_path / file).unlink()
    (tmp_path / file).symlink_to(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=f"{file}: is a link to a file that is not there"):
        load_hf(tmp_path)


@pytest.mark.parametrize("name", ["\\ud800.safetensors", "x" * 5000 + ".safetensors", "a\\nb.safetensors"])
def test_shard_name_that_no_file_can_have_is_refused(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{name}"}}}}')
    with pytest.raises(CheckpointError, match="does not name a file inside the folder"):
        load_hf(tmp_path)
