"""Where a folder can be made and where not: told before anything is written, and nothing is left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qwen35_jax.checkpoint.staging import check_destination, staged_folder
from qwen35_jax.errors import CheckpointError


def write(destination: Path) -> None:
    with staged_folder(destination, nbytes=10) as folder:
        (folder / "file").write_text("0123456789")


@pytest.mark.parametrize(
    "name", ["new", "a/b/new", "empty", "link to empty", "link to nothing", "x" * 250, "a/../new"]
)
def test_folder_appears_under_the_name_that_was_given(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link to empty").symlink_to(tmp_path / "empty")
    (tmp_path / "link to nothing").symlink_to(tmp_path / "nothing")
    write(tmp_path / name)
    assert (tmp_path / name / "file").read_text() == "0123456789"
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("full", "exists and is not empty"),
        ("file", "is a file"),
        ("file/new", "cannot be made, since .*file is a file"),
        ("loop", "cannot be made: (Symlink loop|its links lead in a circle)"),
        ("x" * 300, "cannot be made: .*name too long"),
        ("nul\0", "cannot be made: .*embedded null"),
    ],
)
def test_place_for_no_folder_is_refused_in_one_line(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "full" / "inside").mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=message):
        write(tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before


def test_mount_point_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing happens beside the destination, and a rename cannot replace what is mounted there."""
    monkeypatch.setattr(Path, "is_mount", lambda self: self == tmp_path)
    with pytest.raises(CheckpointError, match="is where a disk is mounted"):
        check_destination(tmp_path)
    assert check_destination(tmp_path / "inside") == tmp_path / "inside"


def test_folder_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(13, os.strerror(13))  # tests may run as root, who may write anywhere

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(CheckpointError, match="new: cannot be made: Permission denied"):
        write(tmp_path / "new")


def test_what_takes_the_place_meanwhile_is_left_alone(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match="cannot be written: Directory not empty; nothing was written"),
        staged_folder(tmp_path / "new", nbytes=1),
    ):
        (tmp_path / "new" / "of another").mkdir(parents=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "of another"]
