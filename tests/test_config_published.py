"""The published architectures: found by name, in a checkout and in an installed package."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from qwen35_jax.config import ModelConfig, published, published_names
from qwen35_jax.errors import ConfigError

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"

# hidden, feed-forward (or an expert's), layers, heads, kv heads, value heads, experts, tied, vision depth
SIZES = {
    "Qwen/Qwen3.5-0.8B": (1024, 3584, 24, 8, 2, 16, None, True, 12),
    "Qwen/Qwen3.5-2B": (2048, 6144, 24, 8, 2, 16, None, True, 24),
    "Qwen/Qwen3.5-4B": (2560, 9216, 32, 16, 4, 32, None, True, 24),
    "Qwen/Qwen3.5-9B": (4096, 12288, 32, 16, 4, 32, None, False, 27),
    "Qwen/Qwen3.8-27B": (5120, 17408, 64, 24, 4, 48, None, False, 27),
    "Qwen/Qwen3.6-35B-A3B": (2048, 512, 40, 16, 2, 32, 256, False, 27),
    "Qwen/Qwen3.5-122B-A10B": (3072, 1024, 48, 32, 2, 64, 256, False, 27),
    "Qwen/Qwen3.5-397B-A17B": (4096, 1024, 60, 32, 2, 64, 512, False, 27),
}


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes(name):
    config = published(name)
    text, vision = config.text, config.vision
    assert vision is not None
    inner = text.intermediate_size if text.moe is None else text.moe.moe_intermediate_size
    assert (
        text.hidden_size,
        inner,
        text.num_hidden_layers,
        text.num_attention_heads,
        text.num_key_value_heads,
        text.linear_num_value_heads,
        None if text.moe is None else text.moe.num_experts,
        config.tie_word_embeddings,
        vision.depth,
    ) == SIZES[name]


@pytest.mark.parametrize("name", published_names())
def test_what_all_published_models_share(name):
    text = published(name).text
    assert (text.vocab_size, text.head_dim, text.rotary_dim, text.max_context) == (248_320, 256, 64, 262_144)
    assert (text.linear_num_key_heads, text.linear_key_head_dim, text.linear_value_head_dim) == (16, 128, 128)
    assert (text.rope.rope_theta, text.rope.mrope_section, text.rms_norm_eps) == (1e7, (11, 11, 10), 1e-6)
    assert text.layer_types == (("linear_attention",) * 3 + ("full_attention",)) * (
        text.num_hidden_layers // 4
    )
    assert text.mtp_num_hidden_layers == 1


@pytest.mark.parametrize("name", ["Qwen/Qwen3.5-0.8B", "qwen3.5-0.8b", "QWEN/qwen3.5-0.8B", "Qwen3.5-0.8B"])
def test_names_are_found_in_any_case_with_or_without_the_publisher(name):
    assert published(name).text.hidden_size == 1024


def test_one_architecture_serves_all_versions():
    assert published("Qwen/Qwen3.5-27B") == published("Qwen/Qwen3.6-27B") == published("Qwen/Qwen3.8-27B")


def test_an_unknown_name_is_refused_with_those_known():
    with pytest.raises(ConfigError, match=r"'Qwen/Qwen3.8-27': did you mean Qwen/Qwen3.8-27B|did you mean"):
        published("Qwen/Qwen3.8-27")
    with pytest.raises(ConfigError) as refusal:
        published("gpt")
    assert all(name in str(refusal.value) for name in published_names())


def test_our_own_notes_stay_out_of_the_configuration():
    written = published("qwen3.5-4b").to_hf()
    assert not [key for key in written if key.startswith("_")]
    assert ModelConfig.from_hf(written) == published("qwen3.5-4b")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.name)
def test_every_file_names_its_models_and_its_source(path):
    data = json.loads(path.read_text())
    assert data["_names"]
    assert len(data["_source"]) > 40
    row = re.search(
        rf"^\| `{re.escape(path.name)}` \| (.*?) \|", (CONFIGS / "README.md").read_text(), re.MULTILINE
    )
    assert row is not None, "listed in configs/README.md"
    assert row[1] == ", ".join(data["_names"])


def test_an_installed_package_finds_them_beside_its_code(tmp_path):
    """What the wheel does: `configs/` goes into the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert (
        project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]["configs"]
        == "qwen35_jax/configs"
    )
    package = tmp_path / "qwen35_jax"
    package.mkdir()
    for name in ("config", "errors.py", "__init__.py"):
        source = ROOT / "src" / "qwen35_jax" / name
        target = package / name
        if source.is_dir():
            target.mkdir()
            for file in source.glob("*.py"):
                (target / file.name).write_text(file.read_text())
        else:
            target.write_text("" if name == "__init__.py" else source.read_text())
    (package / "configs").mkdir()
    (package / "configs" / "one.json").write_text((CONFIGS / "qwen3.5-4b.json").read_text())
    code = "from qwen35_jax.config import published_names; print(published_names())"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "('Qwen/Qwen3.5-4B',)"
