"""Writing a checkpoint: the source's bytes again, only what changed changed, all or nothing on disk."""

from __future__ import annotations

import dataclasses
import filecmp
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qwen35_jax.checkpoint import export as export_module
from qwen35_jax.checkpoint import staging
from qwen35_jax.checkpoint.export import export_hf
from qwen35_jax.checkpoint.hf import load_hf
from qwen35_jax.errors import CheckpointError
from tests.checkpoint.tiny_checkpoint import read_tensors, same_bytes, write_checkpoint


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def assert_same_files(first: Path, second: Path) -> None:
    assert files_of(first) == files_of(second)
    _, differing, errors = filecmp.cmpfiles(first, second, files_of(first), shallow=False)
    assert not differing
    assert not errors


@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shards": 3},
        {"tied": True},
        {"vision": False, "prefix": "model."},
        {"mtp": False, "mtp_num_hidden_layers": 0},
        {"attention_bias": True},
    ],
    ids=str,
)
def test_b44_import_then_export_gives_the_same_files(tmp_path: Path, options: dict, mtp: bool) -> None:
    """Names, shapes, data types, bytes, shards, headers, index, config, tokenizer: whole files are compared."""
    write_checkpoint(tmp_path / "in", **options)
    config, parameters, kept = load_hf(tmp_path / "in", mtp=mtp and options.get("mtp", True))
    export_hf(parameters, config, tmp_path / "out", kept=kept, companions=tmp_path / "in")
    assert_same_files(tmp_path / "in", tmp_path / "out")


def test_b44_only_the_changed_tensor_changes(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path / "in", shards=2)
    config, parameters, kept = load_hf(tmp_path / "in")
    mixer = parameters["decoder"]["groups"][0]["layers"][1]["mixer"]
    mixer["k_weight"] = mixer["k_weight"].at[1, 0, 0, 0].add(1)
    export_hf(parameters, config, tmp_path / "out", kept=kept)
    found = read_tensors(tmp_path / "out")
    changed = [name for name in tensors if not same_bytes(found[name], tensors[name])]
    assert changed == ["model.language_model.layers.5.linear_attn.in_proj_qkv.weight"]
    assert (found[changed[0]] != tensors[changed[0]]).sum() == 1


def test_b44_head_left_out_on_purpose_is_not_announced(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "in")
    config, parameters, kept = load_hf(tmp_path / "in")
    visual = {name: x for name, x in kept.tensors.items() if name.startswith("model.visual.")}
    export_hf(parameters, config, tmp_path / "out", kept=dataclasses.replace(kept, tensors=visual))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["text_config"]["mtp_num_hidden_layers"] == 0
    assert not [name for name in read_tensors(tmp_path / "out") if name.startswith("mtp.")]
    load_hf(tmp_path / "out")


def test_new_shards_hold_the_same_tensors_and_stay_below_the_limit(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path / "in")
    config, parameters, kept = load_hf(tmp_path / "in")
    export_hf(parameters, config, tmp_path / "out", kept=kept, max_shard_bytes=10_000)
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 3
    assert all(shard.stat().st_size < 10_000 + 8_000 for shard in shards)  # the header comes on top
    found = read_tensors(tmp_path / "out")
    assert found.keys() == tensors.keys()
    assert all(same_bytes(found[name], tensors[name]) for name in tensors)
    load_hf(tmp_path / "out", mtp=True)


def test_parameters_that_do_not_fit_the_config_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "in")
    config, parameters, kept = load_hf(tmp_path / "in")
    parameters["final_norm"]["weight"] = np.zeros(7, np.float32)
    with pytest.raises(CheckpointError, match=r"'final_norm\.weight': found shape \(7,\)"):
        export_hf(parameters, config, tmp_path / "out", kept=kept)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_destination_in_use_is_refused_and_left_alone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "in")
    config, parameters, kept = load_hf(tmp_path / "in")
    before = files_of(tmp_path / "in")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        export_hf(parameters, config, tmp_path / "in", kept=kept)
    assert files_of(tmp_path / "in") == before
    (tmp_path / "empty").mkdir()
    export_hf(parameters, config, tmp_path / "empty", kept=kept)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        export_hf(parameters, config, tmp_path / "file", kept=kept)


def test_error_in_the_middle_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "in")
    config, parameters, kept = load_hf(tmp_path / "in")
    assemble = export_module._assemble

    def fail_at_the_norm(tensor, *rest):
        if tensor.name.endswith("language_model.norm.weight"):
            raise KeyboardInterrupt
        return assemble(tensor, *rest)

    monkeypatch.setattr(export_module, "_assemble", fail_at_the_norm)
    with pytest.raises(KeyboardInterrupt):
        export_hf(parameters, config, tmp_path / "out", kept=kept)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_disk_with_too_little_room_is_refused_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "in")
    config, parameters, kept = load_hf(tmp_path / "in")
    usage = staging.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"needs [0-9.]+ MB, but only 0\.0 MB are free"):
        export_hf(parameters, config, tmp_path / "out", kept=kept)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


WRITE_WITH_A_FILE_LIMIT = """
import resource, signal, sys
from qwen35_jax.checkpoint.export import export_hf
from qwen35_jax.checkpoint.hf import load_hf
from qwen35_jax.errors import CheckpointError
config, parameters, kept = load_hf(sys.argv[1], to_device=False)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    export_hf(parameters, config, sys.argv[2], kept=kept)
except CheckpointError as error:
    print(error)
"""


def test_disk_that_fills_up_is_reported_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """A limit on file sizes stands for a full disk: the write itself fails, in the middle of the weights."""
    write_checkpoint(tmp_path / "in")
    command = [sys.executable, "-c", WRITE_WITH_A_FILE_LIMIT, str(tmp_path / "in"), str(tmp_path / "out")]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "the disk is full; nothing was written" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


WRITE_SLOWLY = """
import sys, time
from qwen35_jax.checkpoint import export
from qwen35_jax.checkpoint.hf import load_hf
config, parameters, kept = load_hf(sys.argv[1], to_device=False)
assemble = export._assemble
def slowly(*arguments):
    print("writing", flush=True)
    time.sleep(60)
export._assemble = slowly
export.export_hf(parameters, config, sys.argv[2], kept=kept)
"""


def test_killed_export_leaves_no_destination(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "in")
    command = [sys.executable, "-c", WRITE_SLOWLY, str(tmp_path / "in"), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["in"]


def test_files_are_as_readable_as_any_new_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "in")
    config, parameters, kept = load_hf(tmp_path / "in")
    umask = os.umask(0o022)
    try:
        export_hf(parameters, config, tmp_path / "out", kept=kept)
    finally:
        os.umask(umask)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("limit", [0, -1])
def test_shards_of_no_bytes_are_refused(tmp_path: Path, limit: int) -> None:
    write_checkpoint(tmp_path / "in")
    config, parameters, kept = load_hf(tmp_path / "in")
    with pytest.raises(CheckpointError, match=f"max_shard_bytes: found {limit}"):
        export_hf(parameters, config, tmp_path / "out", kept=kept, max_shard_bytes=limit)


def test_parameters_that_are_no_real_numbers_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "in")
    config, parameters, kept = load_hf(tmp_path / "in", to_device=False)
    parameters["final_norm"]["weight"] = parameters["final_norm"]["weight"].astype(np.int8)
    with pytest.raises(CheckpointError, match=r"'final_norm\.weight': found int8, expected float16"):
        export_hf(parameters, config, tmp_path / "out", kept=kept)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
