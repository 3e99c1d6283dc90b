"""The table of tensor names: what lies where in a file, in both directions."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from qwen35_jax.checkpoint.export import export_hf
from qwen35_jax.checkpoint.hf import load_hf
from qwen35_jax.checkpoint.parameter_tree import parameter_leaves
from qwen35_jax.checkpoint.tensor_table import (
    KEPT_PREFIXES,
    bound_tensors,
    parameter_shapes,
)
from qwen35_jax.config import ModelConfig
from qwen35_jax.model import abstract_model
from qwen35_jax.spec import hf_tensor_shapes
from qwen35_jax.spec.tensor_rules import SPELLINGS, Spelling, default_spelling
from tests.checkpoint import tiny_checkpoint as tiny
from tests.checkpoint.tiny_checkpoint import same_bytes, tensor_shapes, write_checkpoint, write_files

GOLDEN = Path(__file__).parent.parent / "golden" / "tensor_names"


def read_layers(folder: Path) -> dict:
    _, parameters, _ = load_hf(folder, to_device=False)
    return parameters["decoder"]["groups"][0]["layers"]


def test_names_and_shapes_are_those_of_the_documented_format() -> None:
    for tied in (False, True):
        for spelling in SPELLINGS:
            data = tiny.config_json(tied=tied, attention_bias=True)
            bound = bound_tensors(ModelConfig.from_hf(data), spelling, mtp=True, lm_head=False)
            found = {tensor.name: tensor.shape for tensor in bound}
            assert found == tensor_shapes(data, prefix=spelling.text, mtp=True, vision=False)


@pytest.mark.parametrize("without", ["nothing", "vision", "vision and text model type"])
def test_the_specification_spells_the_tensors_as_an_export_does(without: str) -> None:
    data = tiny.config_json(attention_bias=True)
    if without != "nothing":
        del data["vision_config"]
    if without == "vision and text model type":
        data = {**data.pop("text_config"), **data}
    config = ModelConfig.from_hf(data)
    bound = bound_tensors(config, default_spelling(config), mtp=True, lm_head=False)
    listed = hf_tensor_shapes(config)
    assert {tensor.name: tensor.shape for tensor in bound} == {
        name: shape for name, shape in listed.items() if not name.startswith("model.visual.")
    }
    assert any(name.startswith("model.language_model.") for name in listed)


def test_parameters_are_those_of_the_model() -> None:
    for layer_types in (tiny.MOTIF * 2, ["linear_attention", *tiny.MOTIF, "full_attention"]):
        data = tiny.config_json(layer_types=layer_types, attention_bias=True)
        config = ModelConfig.from_hf(data)
        _, abstract = abstract_model(config, parameter_dtype="bfloat16", dtype="float32", mtp=True)
        assert parameter_shapes(config, mtp=True) == {
            path: leaf.shape for path, leaf in parameter_leaves(abstract)
        }


def test_b27_query_and_gate_rows_are_interleaved_per_head(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    name = "model.language_model.layers.7.self_attn.q_proj.weight"
    head = np.arange(tiny.HEADS)[:, None, None] + 1.0
    rows = np.concatenate([head, -head], axis=1).repeat(tiny.HEAD_DIM, axis=1)
    weight = np.broadcast_to(rows, (tiny.HEADS, 2 * tiny.HEAD_DIM, tiny.EMBED))
    tensors[name] = weight.reshape(-1, tiny.EMBED).astype(tiny.BFLOAT16)
    write_files(tmp_path, tiny.config_json(), tensors)
    mixer = read_layers(tmp_path)[3]["mixer"]
    for index in range(tiny.HEADS):
        assert (mixer["q_weight"][1, index] == index + 1).all()
        assert (mixer["gate_weight"][1, index] == -(index + 1)).all()


def test_b28_projections_of_the_delta_net_are_flat_one_part_after_the_other(tmp_path: Path) -> None:
    """Every row is filled with a number that tells part, head and dimension."""

    def labels(part: int, heads: int, dim: int) -> np.ndarray:
        return (part * 64 + np.arange(heads)[:, None] * 10 + np.arange(dim)).reshape(-1)

    q = labels(0, tiny.KEY_HEADS, tiny.KEY_DIM)
    k = labels(1, tiny.KEY_HEADS, tiny.KEY_DIM)
    v = labels(2, tiny.VALUE_HEADS, tiny.VALUE_DIM)
    rows = np.concatenate([q, k, v]).astype(np.float32)
    tensors = write_checkpoint(tmp_path)
    prefix = "model.language_model.layers.4.linear_attn."
    tensors[prefix + "in_proj_qkv.weight"] = np.repeat(rows[:, None], tiny.EMBED, 1)
    taps = rows[:, None, None] + np.arange(tiny.KERNEL) / 8
    tensors[prefix + "conv1d.weight"] = taps.astype(np.float32)
    write_files(tmp_path, tiny.config_json(), tensors)
    mixer = read_layers(tmp_path)[0]["mixer"]
    for part, values, heads in (
        ("q", q, tiny.KEY_HEADS),
        ("k", k, tiny.KEY_HEADS),
        ("v", v, tiny.VALUE_HEADS),
    ):
        per_head = values.reshape(heads, -1)
        assert (mixer[f"{part}_weight"][1] == per_head[:, :, None]).all()
        for tap in range(tiny.KERNEL):
            assert (mixer[f"conv_{part}"][1, tap] == per_head + tap / 8).all()


def test_b28_final_norm_is_stored_as_the_offset_from_one(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    _, parameters, _ = load_hf(tmp_path, to_device=False)
    assert same_bytes(parameters["final_norm"]["weight"], tensors["model.language_model.norm.weight"])


def test_b49_conv_weight_is_not_guessed_from_its_shape(tmp_path: Path) -> None:
    """With as many channels as taps, a guess by shape could not tell the two axes apart."""
    sizes = {
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 1,
        "linear_key_head_dim": 1,
        "linear_value_head_dim": 2,
    }
    data = tiny.config_json(layer_types=["linear_attention"], **sizes)
    config = ModelConfig.from_hf(data)
    shapes = {
        tensor.name: tensor.shape for tensor in bound_tensors(config, SPELLINGS[0], mtp=False, lm_head=False)
    }
    name = "model.language_model.layers.0.linear_attn.conv1d.weight"
    assert shapes[name] == (4, 1, 4)
    tensors = tiny.random_tensors(shapes)
    write_files(tmp_path / "in", data, tensors)
    config, parameters, kept = load_hf(tmp_path / "in", to_device=False)
    mixer = parameters["decoder"]["groups"][0]["layers"][0]["mixer"]
    assert (mixer["conv_v"][0, :, 0, 1] == tensors[name][3, 0, :]).all()
    assert (mixer["conv_q"][0, :, 0, 0] == tensors[name][0, 0, :]).all()
    export_hf(parameters, config, tmp_path / "out", kept=kept)
    assert same_bytes(tiny.read_tensors(tmp_path / "out")[name], tensors[name])


@hypothesis.given(
    heads=st.sampled_from([(2, 1), (4, 2), (3, 3)]),
    delta_heads=st.sampled_from([(1, 1), (2, 2), (2, 6), (1, 4)]),
    dims=st.tuples(*[st.integers(1, 5)] * 3),
    kinds=st.lists(st.sampled_from(["linear_attention", "full_attention"]), min_size=1, max_size=7),
    bias=st.booleans(),
    tied=st.booleans(),
    mtp=st.booleans(),
)
@hypothesis.settings(max_examples=25)
def test_import_then_export_is_the_identity(
    tmp_path_factory, heads, delta_heads, dims, kinds, bias, tied, mtp
) -> None:
    folder = tmp_path_factory.mktemp("identity")
    embed, key_dim, value_dim = (size * 2 + 1 for size in dims)
    data = tiny.config_json(
        vision=False,
        tied=tied,
        layer_types=kinds,
        attention_bias=bias,
        hidden_size=embed,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        linear_num_key_heads=delta_heads[0],
        linear_num_value_heads=delta_heads[1],
        linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim,
    )
    config = ModelConfig.from_hf(data)
    bound = bound_tensors(config, SPELLINGS[2], mtp=True, lm_head=tied)
    tensors = tiny.random_tensors({tensor.name: tensor.shape for tensor in bound})
    if tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write_files(folder / "in", data, tensors)
    config, parameters, kept = load_hf(folder / "in", to_device=False, mtp=mtp)
    assert ("mtp" in parameters) == mtp
    # Nothing is lost or doubled: the parameters hold as many numbers as the tensors they came from.
    numbers = sum(array.size for array in jax.tree.leaves(parameters))
    used = sum(x.size for name, x in tensors.items() if mtp or not name.startswith("mtp."))
    assert numbers == used - (tensors["lm_head.weight"].size if tied else 0)
    export_hf(parameters, config, folder / "out", kept=kept)
    assert (folder / "out" / "model.safetensors").read_bytes() == (
        folder / "in" / "model.safetensors"
    ).read_bytes()


def test_kept_layout_does_not_hide_a_table_that_is_wrong(tmp_path: Path) -> None:
    """Swapping two parameters changes the exported file, so the identity above is not one of untouched bytes."""
    write_checkpoint(tmp_path / "in")
    config, parameters, kept = load_hf(tmp_path / "in", to_device=False)
    mixer = parameters["decoder"]["groups"][0]["layers"][3]["mixer"]
    mixer["q_weight"], mixer["gate_weight"] = mixer["gate_weight"], mixer["q_weight"]
    export_hf(parameters, config, tmp_path / "out", kept=dataclasses.replace(kept))
    before, after = tiny.read_tensors(tmp_path / "in"), tiny.read_tensors(tmp_path / "out")
    changed = {name for name in before if not same_bytes(before[name], after[name])}
    assert changed == {f"model.language_model.layers.{i}.self_attn.q_proj.weight" for i in (3, 7)}


@pytest.mark.parametrize(
    ("names", "spelling"), [("vlm_dense", SPELLINGS[0]), ("causal_dense", SPELLINGS[2])], ids=str
)
def test_names_and_shapes_are_those_that_transformers_has(names: str, spelling: Spelling) -> None:
    lines = (GOLDEN / f"{names}.txt").read_text().splitlines()
    listed = {name: tuple(json.loads(shape)) for name, shape in (line.split("\t") for line in lines)}
    data = tiny.config_json(
        layer_types=tiny.MOTIF,
        vocab_size=640,
        hidden_size=96,
        intermediate_size=112,
        num_attention_heads=4,
        head_dim=64,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2]},
    )
    data["vision_config"]["out_hidden_size"] = 96
    bound = bound_tensors(ModelConfig.from_hf(data), spelling, mtp=False, lm_head=False)
    found = {tensor.name: tensor.shape for tensor in bound}
    assert found == {name: shape for name, shape in listed.items() if not name.startswith(KEPT_PREFIXES)}
