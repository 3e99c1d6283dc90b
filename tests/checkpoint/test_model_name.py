"""What a model's name means, in which order, and the one line for everything else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from qwen35_jax.checkpoint import model_name
from qwen35_jax.checkpoint.model_name import find_config, find_model
from qwen35_jax.config import ModelConfig, published
from qwen35_jax.errors import CheckpointError
from tests.checkpoint.tiny_checkpoint import VOCAB, config_json, write_checkpoint

PUBLISHED = "Qwen/Qwen3.5-0.8B"
UNPUBLISHED = "someone/some-finetune"


def write_config(folder: Path, vocab_size: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_json(vocab_size=vocab_size)))
    return folder


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, dict]]:
    """Stands for the hub, which has every model, with a vocabulary of 31; collects what it is asked for."""
    asked: list[tuple[str, dict]] = []
    folder = write_config(tmp_path / "from_hub", 31)

    def download(hub_id: str, **options: list[str]) -> Path:
        asked.append((hub_id, options))
        return folder

    monkeypatch.setattr(model_name, "download", download)
    monkeypatch.chdir(tmp_path)
    return asked


def vocabulary(name: str | Path) -> int:
    return find_config(name).text.vocab_size


def test_the_built_in_model_then_paths_then_published_names_then_the_hub(
    downloads: list[tuple[str, dict]], tmp_path: Path
) -> None:
    built_in = find_model("nano")
    assert (built_in / "model.safetensors").is_file()
    write_config(tmp_path / "nano", 37)
    assert find_model("nano") == built_in
    assert find_config("nano") == ModelConfig.from_hf(built_in)
    assert vocabulary("./nano") == vocabulary(tmp_path / "nano") == 37
    assert find_model("./nano") == Path("nano")

    assert find_config(PUBLISHED) == find_config("qwen3.5-0.8b") == published(PUBLISHED)
    assert not downloads
    # A published name alone has no weights: for these, the hub is asked.
    assert find_model(PUBLISHED) == tmp_path / "from_hub"
    assert downloads.pop() == (PUBLISHED, {})
    assert vocabulary(UNPUBLISHED) == 31
    assert downloads.pop() == (UNPUBLISHED, {"wanted": ["config.json"]})

    for name in (PUBLISHED, UNPUBLISHED):
        write_config(tmp_path / name, 41)
        assert vocabulary(name) == 41
        assert find_model(name) == Path(name)
    assert not downloads


def test_a_config_may_be_named_itself_and_a_model_may_not(tmp_path: Path) -> None:
    file = write_config(tmp_path / "model", 43) / "config.json"
    assert vocabulary(file) == 43
    with pytest.raises(CheckpointError, match="is a file; give the folder"):
        find_model(file)


@pytest.mark.parametrize("find", [find_model, find_config])
@pytest.mark.parametrize(
    "source", ["no_such_model", "/no/such/folder", "a/b/c", "", "./here", "~nobody-here/model"]
)
def test_an_unknown_name_is_refused_in_the_same_words_by_all(find, source: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        find(source)
    line = f"'{source}': no such file or folder, and neither 'nano' nor a hub id (like Qwen/Qwen3.5-0.8B)"
    assert str(caught.value).startswith(line)
    assert ("no published model of the name" in str(caught.value)) == (find is find_config)


def test_a_name_that_is_nearly_a_published_one_is_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(hub_id: str, **options: list[str]) -> Path:
        raise CheckpointError("no such model")

    monkeypatch.setattr(model_name, "download", download)
    with pytest.raises(CheckpointError) as caught:
        find_config("Qwen/Qwen3.5-0.9B")
    assert str(caught.value).startswith(
        "'Qwen/Qwen3.5-0.9B': no such file or folder, and as a hub id: no such model; "
    )
    assert "did you mean Qwen/Qwen3.5-0.8B?" in str(caught.value)


def test_installation_without_the_built_in_model_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_name.importlib.resources, "files", lambda package: tmp_path)
    for find in (find_model, find_config):
        with pytest.raises(CheckpointError, match="built-in model is not part of this installation"):
            find("nano")
    write_checkpoint(tmp_path / "nano")
    assert find_model("nano") == tmp_path / "nano"
    assert vocabulary("nano") == VOCAB


def test_asking_for_shapes_imports_no_jax() -> None:
    code = (
        "import sys\nfrom qwen35_jax.checkpoint.model_name import find_config\n"
        "find_config('nano'), find_config('Qwen/Qwen3.8-27B')\nsys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
