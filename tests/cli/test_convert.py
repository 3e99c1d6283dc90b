"""`qwen35 convert` and `qwen35 export`."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path

import pytest

from qwen35_jax.cli.export import shard_size
from qwen35_jax.cli.main import main
from tests.checkpoint.tiny_checkpoint import read_tensors, same_bytes, write_checkpoint


def test_there_and_back_gives_the_same_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, orbax, back = tmp_path / "source", tmp_path / "orbax", tmp_path / "back"
    write_checkpoint(source, shards=2)
    assert main(["convert", str(source), str(orbax)]) == 0
    told = capsys.readouterr()
    assert told.out.startswith(f"wrote {orbax}: ")
    assert "Writing orbax" in told.err  # the progress bar does not disturb what a script reads
    assert main(["export", str(orbax), str(back), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["destination"] == str(back)
    assert found["bytes"] == sum(path.stat().st_size for path in source.iterdir())
    names = sorted(path.name for path in source.iterdir())
    assert sorted(path.name for path in back.iterdir()) == names
    assert filecmp.cmpfiles(source, back, names, shallow=False)[0] == names


def test_export_cuts_shards_anew(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path / "source")
    assert main(["export", str(tmp_path / "source"), str(tmp_path / "out"), "--max-shard-size", "30KB"]) == 0
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    found = read_tensors(tmp_path / "out")
    assert found.keys() == tensors.keys()
    assert all(same_bytes(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("command", ["convert", "export"])
def test_bad_input_is_one_line_and_status_2(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    (tmp_path / "empty").mkdir()
    for source, complaint in {
        "cut": "is truncated",
        "empty": "config.json",
        "absent": "no such file or folder",
    }.items():
        assert main([command, str(tmp_path / source), str(tmp_path / "out")]) == 2
        told = capsys.readouterr()
        assert told.out == ""
        (line,) = [line for line in told.err.splitlines() if "error" in line]
        assert complaint in line
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("7", 7), ("2K", None), ("5QB", None), ("0", None)],
)
def test_shard_size(text: str, nbytes: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    if nbytes is not None:
        assert shard_size(text) == nbytes
        return
    with pytest.raises(SystemExit):
        main(["export", "nano", "out", "--max-shard-size", text])
    assert f"{text!r} is no size" in capsys.readouterr().err
