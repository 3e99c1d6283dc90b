"""The small files beside the weights: which of them travel, and that nothing else on the machine does."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwen35_jax.checkpoint.companions import COMPANIONS, copy_companions
from qwen35_jax.checkpoint.hub import WANTED
from qwen35_jax.checkpoint.source import convert, export
from qwen35_jax.errors import CheckpointError
from tests.checkpoint import tiny_checkpoint
from tests.checkpoint.tiny_checkpoint import write_checkpoint

LEFT_BEHIND = ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin.index.json", "modeling.py",
               "weights.bin", "source_layout.json", "figure.png", ".gitattributes"]  # fmt: skip


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    source, target = tmp_path / "a", tmp_path / "b"
    source.mkdir()
    target.mkdir()
    return source, target


def test_small_files_are_copied_and_neither_weights_nor_code_are(folders: tuple[Path, Path]) -> None:
    source, target = folders
    for name in [*tiny_checkpoint.COMPANIONS, *LEFT_BEHIND]:
        (source / name).write_text(name)
    (source / "folder.json").mkdir()
    copy_companions(source, target)
    assert sorted(path.name for path in target.iterdir()) == sorted(tiny_checkpoint.COMPANIONS)
    assert all(path.read_text() == path.name for path in target.iterdir())


def test_what_the_destination_has_already_is_left_alone(folders: tuple[Path, Path]) -> None:
    source, target = folders
    for folder in folders:
        (folder / "config.json").write_text(folder.name)
    copy_companions(source, target)
    assert (target / "config.json").read_text() == "b"


def test_what_travels_is_also_what_is_downloaded() -> None:
    assert set(COMPANIONS) < set(WANTED)


@pytest.mark.parametrize("write", [convert, export])
def test_link_out_of_the_folder_is_refused_and_its_target_copied_nowhere(tmp_path: Path, write) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    write_checkpoint(tmp_path / "in")
    (tmp_path / "in" / "NOTICE").symlink_to(secret)
    with pytest.raises(
        CheckpointError, match=r"in/NOTICE: is a link to .*secret, outside the model's folder"
    ):
        write(tmp_path / "in", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "secret"]


def test_link_to_what_is_written_anew_is_no_matter(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "in")
    (tmp_path / "in" / "config.json").rename(tmp_path / "config.json")
    (tmp_path / "in" / "config.json").symlink_to(tmp_path / "config.json")
    export(tmp_path / "in", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == (tmp_path / "config.json").read_text()
    assert not (tmp_path / "out" / "config.json").is_symlink()


def test_links_of_the_hub_cache_are_followed(folders: tuple[Path, Path], tmp_path: Path) -> None:
    _, target = folders
    snapshot, blobs = tmp_path / "model" / "snapshots" / "abc", tmp_path / "model" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "123").write_text("license")
    (snapshot / "LICENSE").symlink_to(blobs / "123")
    copy_companions(snapshot, target)
    assert (target / "LICENSE").read_text() == "license"
    assert not (target / "LICENSE").is_symlink()
