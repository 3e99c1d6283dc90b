"""An adapter comes back from PEFT's files as it went, and a file that does not fit is refused by name."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from qwen35_jax.checkpoint.export import export_hf
from qwen35_jax.errors import CheckpointError, ConfigError
from qwen35_jax.training.lora import LINEAR_MAPS, LoRA, init_adapter, merged
from qwen35_jax.training.peft import CONFIG_FILE, WEIGHTS_FILE, read_peft, write_peft
from tests.small_text_model import FULL, LINEAR, small_config, small_model

LAYERS = (LINEAR, LINEAR, LINEAR, FULL)
SETTINGS = LoRA(rank=3, alpha=7.0, dropout=0.1)
LAYER_3 = "base_model.model.model.layers.3."


def drawn(settings: LoRA, dtype: str = "float32") -> dict[str, Any]:
    """No array of zeros. The values need all digits of their dtype."""

    def draw(path, array):
        rng = np.random.default_rng(zlib.crc32(jax.tree_util.keystr(path).encode()))
        return (0.1 * rng.standard_normal(array.shape)).astype(dtype)

    shapes = jax.eval_shape(lambda: init_adapter(small_config(LAYERS), settings, key=jax.random.key(0)))
    return jax.tree_util.tree_map_with_path(draw, shapes)


def written(folder: Path, settings: LoRA = SETTINGS, dtype: str = "float32") -> Path:
    write_peft(
        folder / "adapter", drawn(settings, dtype), settings, small_config(LAYERS), base_model="some/model"
    )
    return folder / "adapter"


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_every_value_and_setting_comes_back(tmp_path, dtype):
    adapter, settings = read_peft(written(tmp_path, dtype=dtype), small_config(LAYERS))
    expected = drawn(SETTINGS, dtype)
    assert jax.tree.structure(adapter) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(adapter), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype == dtype
        np.testing.assert_array_equal(ours, theirs)
    assert settings == LoRA(rank=3, alpha=7.0, dropout=0.1, targets=LINEAR_MAPS)


def test_a_file_comes_back_byte_for_byte(tmp_path):
    settings = LoRA(rank=2, alpha=2.5, targets=("in_proj_qkv", "q_proj"))
    first = written(tmp_path, settings)
    write_peft(tmp_path / "again", *read_peft(first, small_config(LAYERS)), small_config(LAYERS))
    assert (tmp_path / "again" / WEIGHTS_FILE).read_bytes() == (first / WEIGHTS_FILE).read_bytes()
    fields = json.loads((first / CONFIG_FILE).read_text())
    assert json.loads((tmp_path / "again" / CONFIG_FILE).read_text()) == fields | {
        "base_model_name_or_path": None
    }
    assert (fields["r"], fields["lora_alpha"], fields["target_modules"]) == (
        2,
        2.5,
        ["in_proj_qkv", "q_proj"],
    )


def test_every_tensor_of_the_merged_checkpoint_is_the_sum_of_the_files_by_hand(tmp_path):
    one = small_model("float32", LAYERS)
    changes = load_file(written(tmp_path) / WEIGHTS_FILE)
    export_hf(one.parameters, one.config, tmp_path / "before")
    export_hf(merged(one.parameters, drawn(SETTINGS), SETTINGS), one.config, tmp_path / "after")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("before", "after"))
    assert before.keys() == after.keys()
    adapted = 0
    for name, weight in before.items():
        prefix = "base_model.model." + name.removesuffix(".weight")
        if f"{prefix}.lora_A.weight" not in changes:
            np.testing.assert_array_equal(after[name], weight, err_msg=name)
            continue
        a, b = (changes[f"{prefix}.lora_{side}.weight"].astype("float64") for side in "AB")
        np.testing.assert_allclose(after[name], weight + 7 / 3 * (b @ a), rtol=1e-6, atol=1e-6, err_msg=name)
        adapted += 2
    assert adapted == len(changes) == 2 * (3 * 5 + 4 + 4 * 3)


def changed(folder: Path, change) -> None:
    """The tensors of an adapter's file, changed."""
    tensors = load_file(folder / WEIGHTS_FILE)
    save_file(change(tensors), folder / WEIGHTS_FILE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: {name.replace(".layers.", ".blocks."): x for name, x in tensors.items()},
            "no tensor belongs to a layer of this family",
        ),
        (lambda _: {}, "there are none"),
        (
            lambda tensors: (
                tensors | {LAYER_3 + "self_attn.conv1d.lora_A.weight": np.zeros((3, 40), "float32")}
            ),
            "layers.3.self_attn.conv1d.lora_A.weight' belongs to nothing that can be adapted",
        ),
        (
            lambda tensors: (
                tensors | {LAYER_3 + "self_attn.q_proj.lora_magnitude_vector": np.zeros(256, "float32")}
            ),
            "lora_magnitude_vector' belongs to nothing",
        ),
        (
            lambda tensors: {
                name: x for name, x in tensors.items() if not name.endswith("q_proj.lora_B.weight")
            },
            "layers.3.self_attn.q_proj.lora_B.weight' is missing",
        ),
        (
            lambda tensors: {name: x for name, x in tensors.items() if ".layers.1.mlp.up_proj" not in name},
            "layers.1.mlp.up_proj.lora_A.weight' is missing",
        ),
        (
            lambda tensors: (
                tensors | {LAYER_3 + "self_attn.q_proj.lora_B.weight": np.zeros((128, 3), "float32")}
            ),
            r"q_proj.lora_B.weight' has shape \[128, 3\], but rank 3 .* ask for \[256, 3\]",
        ),
        (
            lambda tensors: tensors | {LAYER_3 + "mlp.up_proj.lora_A.weight": np.zeros((3, 40), "float16")},
            "up_proj.lora_A.weight' is float16, expected",
        ),
    ],
)
def test_b79_b80_tensors_that_do_not_fit_are_refused_by_name(tmp_path, change, message):
    folder = written(tmp_path)
    changed(folder, change)
    with pytest.raises(CheckpointError, match=message):
        read_peft(folder, small_config(LAYERS))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 4}, "lora_A.weight' has shape .*, but rank 4 of adapter_config.json"),
        ({"r": "3"}, "r is '3', expected a whole number"),
        ({"lora_alpha": None}, "lora_alpha is None, expected a number"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3', expected 'LORA'"),
        ({"use_dora": True}, "use_dora is True, expected none"),
        ({"use_rslora": True}, "use_rslora is True, expected none"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"bias": "all"}, "bias is 'all', expected 'none'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', expected true"),
        ({"target_modules": ["q_proj", "in_proj_ba"]}, "names 'in_proj_ba', but no tensor"),
    ],
)
def test_b79_b80_settings_that_do_not_fit_are_refused_by_name(tmp_path, fields, message):
    folder = written(tmp_path)
    known = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(known | fields))
    with pytest.raises(CheckpointError, match=message):
        read_peft(folder, small_config(LAYERS))


def test_an_adapter_of_another_rank_or_with_a_map_too_few_is_not_written(tmp_path):
    config = small_config(LAYERS)
    with pytest.raises(CheckpointError, match="but the settings and the model ask for"):
        write_peft(tmp_path / "rank", drawn(SETTINGS), LoRA(rank=5), config)
    with pytest.raises(CheckpointError, match=r"found shape None"):
        write_peft(tmp_path / "few", drawn(LoRA(rank=3, targets=("q_proj",))), SETTINGS, config)
    with pytest.raises(ConfigError, match="'q_proj' matches nothing"):
        write_peft(tmp_path / "none", {}, LoRA(targets=("q_proj",)), small_config((LINEAR, LINEAR)))
    assert list(tmp_path.iterdir()) == []
