"""Loading a folder in Hugging Face layout: right values, and a clear refusal of what does not fit."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.checkpoint import streaming
from qwen35_jax.checkpoint.export import export_hf
from qwen35_jax.checkpoint.hf import load_hf
from qwen35_jax.checkpoint.parameter_tree import parameter_leaves
from qwen35_jax.errors import CheckpointError, ConfigError
from tests.checkpoint import tiny_checkpoint as tiny
from tests.checkpoint.tiny_checkpoint import (
    SPELLINGS,
    assert_same_parameters,
    config_json,
    read_tensors,
    same_bytes,
    write_checkpoint,
    write_files,
)


def leaves(parameters: dict) -> dict[tuple, np.ndarray]:
    return {path: np.asarray(array) for path, array in parameter_leaves(parameters)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, write_checkpoint(folder, shards=3)


def test_layer_of_the_file_is_at_its_repeat_and_position(checkpoint) -> None:
    folder, tensors = checkpoint
    _, parameters, _ = load_hf(folder)
    layers = parameters["decoder"]["groups"][0]["layers"]
    for index in range(8):
        norm = tensors[f"model.language_model.layers.{index}.input_layernorm.weight"]
        assert same_bytes(np.asarray(layers[index % 4]["input_norm"]["weight"])[index // 4], norm)


def test_parameters_are_jax_arrays_in_the_file_s_data_types(checkpoint) -> None:
    _, parameters, _ = load_hf(checkpoint[0])
    for path, array in parameter_leaves(parameters):
        assert isinstance(array, jax.Array)
        assert array.dtype == (jnp.float32 if path[-1] in ("A_log", "norm_weight") else jnp.bfloat16)


def test_b22_gate_parameters_are_never_narrowed(tmp_path: Path) -> None:
    """-4.398156 is no bfloat16 number; the nearest one changes a decay over 4096 steps by 44%."""
    tensors = write_checkpoint(tmp_path / "in")
    exact = np.float32(-4.398156)
    for name, tensor in tensors.items():
        if name.endswith(("A_log", "dt_bias")):
            tensors[name] = np.full(tensor.shape, exact)
    write_files(tmp_path / "in", config_json(), tensors)
    config, parameters, kept = load_hf(tmp_path / "in", parameter_dtype="bfloat16")
    mixer = parameters["decoder"]["groups"][0]["layers"][0]["mixer"]
    for name in ("A_log", "dt_bias"):
        assert mixer[name].dtype == jnp.float32
        assert (np.asarray(mixer[name]) == exact).all()
    assert mixer["norm_weight"].dtype == jnp.float32
    assert mixer["q_weight"].dtype == jnp.bfloat16
    export_hf(parameters, config, tmp_path / "out", kept=kept)
    found = read_tensors(tmp_path / "out")
    assert all(same_bytes(found[name], tensors[name]) for name in tensors)


def test_layers_that_store_different_types_share_the_wider_one(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path / "in")
    name = "model.language_model.layers.4.linear_attn.A_log"
    tensors[name] = tensors[name].astype(tiny.BFLOAT16)
    write_files(tmp_path / "in", config_json(), tensors)
    config, parameters, kept = load_hf(tmp_path / "in")
    assert parameters["decoder"]["groups"][0]["layers"][0]["mixer"]["A_log"].dtype == jnp.float32
    export_hf(parameters, config, tmp_path / "out", kept=kept)
    assert same_bytes(read_tensors(tmp_path / "out")[name], tensors[name])


def test_parameter_dtype_casts_as_numpy_does(checkpoint) -> None:
    folder, tensors = checkpoint
    _, parameters, _ = load_hf(folder, parameter_dtype="float32")
    assert all(array.dtype == jnp.float32 for _, array in parameter_leaves(parameters))
    embedding = tensors["model.language_model.embed_tokens.weight"]
    assert same_bytes(np.asarray(parameters["embed_tokens"]["weight"]), embedding.astype(np.float32))


def test_b46_norm_weights_are_taken_and_written_as_they_are(tmp_path: Path) -> None:
    """Twice through import and export, with and without the MTP head: no norm is ever shifted by one."""
    tensors = write_checkpoint(tmp_path / "0")
    for mtp in (False, True):
        source = tmp_path / "0"
        for turn in (1, 2):
            config, parameters, kept = load_hf(source, mtp=mtp)
            target = tmp_path / f"{mtp}{turn}"
            export_hf(parameters, config, target, kept=kept)
            source = target
        found = read_tensors(source)
        assert all(same_bytes(found[name], tensors[name]) for name in tensors)
    assert same_bytes(np.asarray(parameters["mtp"]["norm"]["weight"]), tensors["mtp.norm.weight"])


def test_mtp_columns_are_embedding_first(checkpoint) -> None:
    folder, tensors = checkpoint
    _, parameters, kept = load_hf(folder, mtp=True)
    fc = tensors["mtp.fc.weight"]
    assert same_bytes(np.asarray(parameters["mtp"]["fc_weight"])[:, 0], fc[:, : tiny.EMBED])
    assert same_bytes(np.asarray(parameters["mtp"]["fc_weight"])[:, 1], fc[:, tiny.EMBED :])
    assert not [name for name in kept.tensors if name.startswith("mtp.")]


@pytest.mark.parametrize("prefix", SPELLINGS)
def test_b47_every_spelling_gives_the_same_parameters_and_is_written_back(
    checkpoint, tmp_path: Path, prefix: str
) -> None:
    folder, tensors = checkpoint
    renamed = {}
    for name, tensor in tensors.items():
        name = name.replace("model.language_model.", prefix)
        renamed[SPELLINGS[prefix] + name if name == "lm_head.weight" else name] = tensor
    write_files(tmp_path / "in", config_json(), renamed)
    config, parameters, kept = load_hf(tmp_path / "in")
    assert_same_parameters(parameters, load_hf(folder)[1])
    export_hf(parameters, config, tmp_path / "out", kept=kept)
    found = read_tensors(tmp_path / "out")
    assert found.keys() == renamed.keys()
    assert all(same_bytes(found[name], renamed[name]) for name in renamed)


def test_b47_two_spellings_of_one_tensor_are_refused(checkpoint, tmp_path: Path) -> None:
    tensors = dict(checkpoint[1])
    tensors["model.norm.weight"] = tensors["model.language_model.norm.weight"]
    write_files(tmp_path, config_json(), tensors)
    with pytest.raises(CheckpointError, match="spell the model's prefix in two ways"):
        load_hf(tmp_path)


@pytest.mark.parametrize(("vision", "prefix"), [(True, "model.language_model."), (False, "model.")])
def test_b47_without_a_source_names_are_those_of_the_class(tmp_path: Path, vision: bool, prefix: str) -> None:
    tensors = write_checkpoint(tmp_path / "in", prefix=prefix, vision=vision, mtp=False)
    config, parameters, _ = load_hf(tmp_path / "in")
    export_hf(parameters, config, tmp_path / "out")
    text = {name for name in tensors if not name.startswith("model.visual.")}
    assert read_tensors(tmp_path / "out").keys() == text


@pytest.mark.parametrize("level", ["root", "text_config"])
@pytest.mark.parametrize("tied", [True, False])
def test_b48_tying_follows_the_flag_that_counts(tmp_path: Path, tied: bool, level: str) -> None:
    """In a flat file the flag stands in the only place; in a nested one the root's counts."""
    config = config_json(vision=level == "root", tied=tied)
    if level == "root":
        config["text_config"]["tie_word_embeddings"] = not tied
    prefix = "model.language_model." if level == "root" else "model."
    shapes = tiny.tensor_shapes(config, prefix=prefix, mtp=True, vision=level == "root")
    tensors = tiny.random_tensors(shapes)
    write_files(tmp_path, config, tensors)
    loaded, parameters, _ = load_hf(tmp_path)
    assert loaded.tie_word_embeddings == tied
    assert ("lm_head" in parameters) == (not tied)
    if not tied:
        assert same_bytes(np.asarray(parameters["lm_head"]["weight"]), tensors["lm_head.weight"])


def test_b48_untied_without_a_head_is_refused(checkpoint, tmp_path: Path) -> None:
    tensors = {name: x for name, x in checkpoint[1].items() if name != "lm_head.weight"}
    write_files(tmp_path, config_json(), tensors)
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' is missing"):
        load_hf(tmp_path)


def test_b48_tied_with_a_head_that_differs_is_refused(checkpoint, tmp_path: Path) -> None:
    write_files(tmp_path, config_json(tied=True), checkpoint[1])
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' differs from the embedding"):
        load_hf(tmp_path)


def test_b48_tied_with_an_equal_head_is_one_parameter_and_two_tensors_again(
    checkpoint, tmp_path: Path
) -> None:
    tensors = dict(checkpoint[1])
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"]
    write_files(tmp_path / "in", config_json(tied=True), tensors)
    config, parameters, kept = load_hf(tmp_path / "in")
    assert "lm_head" not in parameters
    parameters["embed_tokens"]["weight"] = parameters["embed_tokens"]["weight"] + 1
    export_hf(parameters, config, tmp_path / "out", kept=kept)
    found = read_tensors(tmp_path / "out")
    assert found.keys() == tensors.keys()
    assert same_bytes(found["lm_head.weight"], found["model.language_model.embed_tokens.weight"])


def test_b45_announced_head_without_tensors_is_said_and_switched_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path / "in", mtp=False)
    with caplog.at_level(logging.WARNING):
        config, parameters, kept = load_hf(tmp_path / "in")
    assert "hold no mtp.* tensors" in caplog.text
    assert config.text.mtp_num_hidden_layers == 0
    assert "mtp" not in parameters
    with pytest.raises(CheckpointError, match=r"hold no mtp\.\* tensors"):
        load_hf(tmp_path / "in", mtp=True)
    export_hf(parameters, config, tmp_path / "out", kept=kept)
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert exported["text_config"]["mtp_num_hidden_layers"] == 0
    assert exported["text_config"]["some_key_of_a_later_version"] == {"kept": True}


def test_b45_head_that_the_config_does_not_announce_is_said_kept_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path, mtp_num_hidden_layers=0)
    with caplog.at_level(logging.WARNING):
        _, parameters, kept = load_hf(tmp_path)
    assert "they are kept and not used" in caplog.text
    assert "mtp" not in parameters
    assert "mtp.fc.weight" in kept.tensors
    with pytest.raises(CheckpointError, match="mtp_num_hidden_layers 0"):
        load_hf(tmp_path, mtp=True)


def test_b54_no_parameter_keeps_its_initial_value(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = streaming.aligned_empty

    def filled_with_nan(shape, dtype) -> np.ndarray:
        memory = allocate(shape, dtype)
        memory[...] = np.nan
        return memory

    monkeypatch.setattr(streaming, "aligned_empty", filled_with_nan)
    for dtype in (None, "float32"):
        _, parameters, _ = load_hf(checkpoint[0], mtp=True, parameter_dtype=dtype)
        for path, array in parameter_leaves(parameters):
            assert not np.isnan(np.asarray(array, np.float32)).any(), path


def test_large_parameters_are_read_in_pieces_that_fit_together(
    checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load_hf(checkpoint[0], mtp=True)[1]
    monkeypatch.setattr(streaming, "_PIECE", 100)
    assert_same_parameters(load_hf(checkpoint[0], mtp=True)[1], expected)
    widened = load_hf(checkpoint[0], mtp=True, parameter_dtype="float32")[1]
    for path, array in leaves(expected).items():
        assert (leaves(widened)[path] == array.astype(np.float32)).all(), path


@pytest.mark.parametrize(
    "name",
    [
        "model.language_model.layers.6.linear_attn.dt_bias",
        "model.language_model.layers.3.self_attn.q_norm.weight",
        "model.language_model.norm.weight",
    ],
)
def test_b54_missing_tensor_is_refused_by_name(checkpoint, tmp_path: Path, name: str) -> None:
    tensors = {other: x for other, x in checkpoint[1].items() if other != name}
    write_files(tmp_path, config_json(), tensors)
    with pytest.raises(CheckpointError, match=f"'{name}' is missing"):
        load_hf(tmp_path)


def test_transposed_tensor_is_refused_by_name(checkpoint, tmp_path: Path) -> None:
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    write_files(tmp_path, config_json(), {**checkpoint[1], name: checkpoint[1][name].T.copy()})
    with pytest.raises(CheckpointError, match=rf"{name}' has shape \[20, 44\].*asks for \[44, 20\]"):
        load_hf(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.language_model.layers.8.input_layernorm.weight",
        "model.language_model.layers.0.self_attn.q_proj.weight",
        "model.language_model.rotary_emb.inv_freq",
        "adapter",
    ],
)
def test_tensor_that_nothing_asks_for_is_refused_by_name(checkpoint, tmp_path: Path, name: str) -> None:
    write_files(tmp_path, config_json(), {**checkpoint[1], name: np.zeros(3, np.float32)})
    with pytest.raises(CheckpointError, match=f"'{name}' belongs to no part"):
        load_hf(tmp_path)


def test_unknown_tensor_of_a_wanted_mtp_head_is_refused_by_name(checkpoint, tmp_path: Path) -> None:
    write_files(tmp_path, config_json(), {**checkpoint[1], "mtp.extra": np.zeros(3, np.float32)})
    assert "mtp.extra" in load_hf(tmp_path)[2].tensors
    with pytest.raises(CheckpointError, match=r"'mtp\.extra' belongs to no part"):
        load_hf(tmp_path, mtp=True)


def test_parameter_that_is_no_float_is_refused_by_name(checkpoint, tmp_path: Path) -> None:
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    tensors = {**checkpoint[1], name: np.zeros(checkpoint[1][name].shape, np.int8)}
    write_files(tmp_path, config_json(), tensors)
    with pytest.raises(CheckpointError, match=f"'{name}' is int8.*quantized"):
        load_hf(tmp_path)


def test_mixture_of_experts_is_refused_before_the_weights_are_looked_at(tmp_path: Path) -> None:
    text = tiny.text_config(
        model_type="qwen3_5_moe_text",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=12,
    )
    del text["intermediate_size"]
    config = {"model_type": "qwen3_5_moe", "tie_word_embeddings": False, "text_config": text}
    write_files(tmp_path, config, {"x": np.zeros(1, np.float32)})
    with pytest.raises(ConfigError, match="num_experts"):
        load_hf(tmp_path)


def test_folder_without_config_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        load_hf(tmp_path)


def test_float64_is_kept_where_jax_can_hold_it(tmp_path: Path, x64: None) -> None:
    shapes = tiny.tensor_shapes(config_json(), prefix="model.language_model.", mtp=True, vision=True)
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    write_files(tmp_path / "in", config_json(), tensors)
    config, parameters, kept = load_hf(tmp_path / "in")
    assert all(array.dtype == jnp.float64 for _, array in parameter_leaves(parameters))
    export_hf(parameters, config, tmp_path / "out", kept=kept)
    found = read_tensors(tmp_path / "out")
    assert all(same_bytes(found[name], tensors[name]) for name in tensors)


def test_irregular_layers_are_found_in_their_groups(tmp_path: Path) -> None:
    kinds = ["full_attention", *tiny.MOTIF, *tiny.MOTIF, "linear_attention"]
    tensors = write_checkpoint(tmp_path / "in", layer_types=kinds)
    config, parameters, kept = load_hf(tmp_path / "in")
    assert len(parameters["decoder"]["groups"]) > 1
    export_hf(parameters, config, tmp_path / "out", kept=kept)
    found = read_tensors(tmp_path / "out")
    assert found.keys() == tensors.keys()
    assert all(same_bytes(found[name], tensors[name]) for name in tensors)


def test_unrolled_layers_are_the_slices_of_the_stacked_ones(checkpoint, tmp_path: Path) -> None:
    folder, tensors = checkpoint
    _, stacked, _ = load_hf(folder)
    config, unrolled, kept = load_hf(folder, unroll_layers=True)
    assert config.text.unroll_layers
    for index in range(8):
        layer = leaves(unrolled["decoder"]["groups"][0]["layers"][index])
        for path, array in leaves(stacked["decoder"]["groups"][0]["layers"][index % 4]).items():
            assert same_bytes(layer[path], array[index // 4][None]), path
    export_hf(unrolled, config, tmp_path / "out", kept=kept)
    found = read_tensors(tmp_path / "out")
    assert all(same_bytes(found[name], tensors[name]) for name in tensors)
