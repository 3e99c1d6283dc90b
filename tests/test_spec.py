"""The specification: counts of the published models, and tensors equal to those of the reference's modules."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import re
from pathlib import Path

import pytest

from qwen35_jax.config import ModelConfig, published, published_names
from qwen35_jax.ops.gated_delta_rule import gated_delta_rule
from qwen35_jax.ops.norms import l2_normalize
from qwen35_jax.spec import Specification, hf_tensor_shapes, specify
from tests.config_files import flat, moe_section, nested, text_section

ROOT = Path(__file__).parents[1]
TENSOR_NAMES = ROOT / "tests" / "golden" / "tensor_names"

TEXT_NODES = [
    "embed", "input_norm", "gdn.in_proj", "gdn.conv", "gdn.core", "gdn.norm", "gdn.out_proj", "attn.qkv_proj",
    "attn.qk_norm", "attn.rope", "attn.core", "attn.gate", "attn.o_proj", "attn_residual", "post_attn_norm",
    "mlp.gate_up", "mlp.act", "mlp.down", "mlp_residual", "final_norm", "lm_head",
]  # fmt: skip
MTP_NODES = ["mtp.fc", "mtp.layer", "mtp.norm"]


def small(layout: str) -> ModelConfig:
    """The models whose state dictionaries are kept in golden/tensor_names."""
    dense, sparse = text_section(), moe_section()
    return ModelConfig.from_hf(
        {
            "causal_dense": flat(dense),
            "causal_dense_tied": flat(dense, tie_word_embeddings=True),
            "causal_moe": flat(sparse),
            "vlm_dense": nested(dense),
            "vlm_moe": nested(sparse),
        }[layout]
    )


def golden_shapes(layout: str) -> dict[str, tuple[int, ...]]:
    lines = (TENSOR_NAMES / f"{layout}.txt").read_text().splitlines()
    return {name: tuple(ast.literal_eval(shape)) for name, shape in (line.split("\t") for line in lines)}


def node(specification: Specification, name: str):
    return next(node for node in specification.nodes if node.name == name)


@pytest.mark.parametrize("layout", ["causal_dense", "causal_moe", "vlm_dense", "vlm_moe"])
def test_tensors_are_those_of_the_reference(layout):
    assert hf_tensor_shapes(small(layout)) == golden_shapes(layout)


def test_a_tied_head_has_no_tensor_though_the_reference_lists_it():
    golden = golden_shapes("causal_dense_tied")
    del golden["lm_head.weight"]  # there the same array as the embedding, and left out of files
    assert hf_tensor_shapes(small("causal_dense_tied")) == golden


@pytest.mark.parametrize(
    "layout", ["causal_dense", "causal_dense_tied", "causal_moe", "vlm_dense", "vlm_moe"]
)
def test_parts_add_up_to_the_reference_parameters(layout):
    specification = specify(small(layout))
    golden = golden_shapes(layout)
    if layout == "causal_dense_tied":
        del golden["lm_head.weight"]
    counts = {name: math.prod(shape) for name, shape in golden.items()}
    vision = sum(count for name, count in counts.items() if ".visual." in name)
    assert specification.by_part["vision"] == vision
    assert specification.text_parameters == sum(counts.values()) - vision


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen3.8-27B", 26_895_998_464),
        ("Qwen/Qwen3.5-0.8B", 752_393_024),
        ("Qwen/Qwen3.5-2B", 1_881_825_088),
        ("Qwen/Qwen3.5-4B", 4_205_751_296),
        ("Qwen/Qwen3.5-9B", 8_953_803_264),
        ("Qwen/Qwen3.6-35B-A3B", 34_660_610_688),
        ("Qwen/Qwen3.5-122B-A10B", 122_111_526_912),
        ("Qwen/Qwen3.5-397B-A17B", 396_346_350_336),
    ],
)
def test_text_parameters_of_the_published_models(name, parameters):
    specification = specify(published(name))
    assert specification.text_parameters == parameters
    total, *active = re.findall(r"[\d.]+(?=B)", name)
    assert parameters / 1e9 == pytest.approx(float(total), rel=0.12)
    for billions in active:
        assert specification.active_parameters / 1e9 == pytest.approx(float(billions), rel=0.16)


def test_the_27b_in_numbers():
    specification = specify(published("Qwen/Qwen3.8-27B"))
    told = specification.to_json()
    assert told["layers"] == {"linear_attention": 48, "full_attention": 16}
    assert node(specification, "gdn.in_proj").maps == "5120 -> 16480"
    assert node(specification, "gdn.conv").maps == "10240 channels"
    assert node(specification, "attn.qkv_proj").maps == "5120 -> 14336"
    assert node(specification, "mlp.gate_up").maps == "5120 -> 34816"
    assert node(specification, "gdn.core").constants["value_heads_per_key_head"] == 3
    assert node(specification, "attn.rope").constants == {
        "theta": 1e7,
        "rotary_dim": 64,
        "mrope_section": [11, 11, 10],
    }
    layers = node(specification, "attn.core").layers
    assert layers == tuple(range(3, 64, 4))
    assert len(node(specification, "gdn.core").layers) == 48
    assert node(specification, "vision.attn").layers == tuple(range(27))
    assert told["parameters"]["by_part"]["lm_head"] == 248_320 * 5120


def test_a_tied_head_counts_once():
    tied = specify(published("Qwen/Qwen3.5-0.8B"))
    assert tied.by_part["lm_head"] == 0
    assert tied.by_part["embedding"] == 248_320 * 1024
    assert node(tied, "lm_head").constants["tied"] is True
    untied = specify(dataclasses.replace(tied.config, tie_word_embeddings=False))
    assert untied.text_parameters - tied.text_parameters == 248_320 * 1024


CONFIGS = {
    **{name: published(name) for name in published_names()},
    "biased": ModelConfig.from_hf(flat(text_section(attention_bias=True, mtp_num_hidden_layers=1))),
    "no attention": ModelConfig.from_hf(flat(text_section(full_attention_interval=5))),
    "no DeltaNet": ModelConfig.from_hf(nested(text_section(full_attention_interval=1))),
    "sparse": ModelConfig.from_hf(flat(moe_section(mtp_num_hidden_layers=1))),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_belongs_to_exactly_one_node(name):
    config = CONFIGS[name]
    owners: dict[str, str] = {}
    shapes = {}
    for one in specify(config).nodes:
        for tensor, shape in one.hf_tensors().items():
            assert tensor not in owners, f"{tensor} is in {owners[tensor]} and {one.name}"
            owners[tensor] = one.name
            shapes[tensor] = shape
    assert shapes == hf_tensor_shapes(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_parts_add_up(name):
    config = CONFIGS[name]
    told = specify(config).to_json()["parameters"]
    by_part = told["by_part"]
    assert told["total"] == sum(by_part.values())
    assert told["total"] == sum(math.prod(shape) for shape in hf_tensor_shapes(config).values())
    assert told["text"] == told["total"] - by_part["mtp"] - by_part["vision"]
    assert {"embedding", "gated_delta_net", "attention", "mlp", "lm_head"} <= by_part.keys()


@pytest.mark.parametrize(
    ("config", "tensors"),
    [(ModelConfig.from_hf(flat(text_section(mtp_num_hidden_layers=1))), 15), (CONFIGS["sparse"], 19)],
    ids=["dense", "sparse"],
)
def test_mtp_has_the_tensors_of_the_published_checkpoints(config, tensors):
    shapes = {name: shape for name, shape in hf_tensor_shapes(config).items() if name.startswith("mtp.")}
    assert len(shapes) == tensors
    assert shapes["mtp.fc.weight"] == (96, 192)
    assert shapes["mtp.layers.0.self_attn.q_proj.weight"] == (512, 96)


def test_nodes_of_a_dense_model_in_order():
    names = [node.name for node in specify(CONFIGS["biased"]).nodes]
    assert names == TEXT_NODES + MTP_NODES


def test_nodes_of_a_sparse_model_in_order():
    names = [node.name for node in specify(CONFIGS["sparse"]).nodes]
    start, end = TEXT_NODES.index("mlp.gate_up"), TEXT_NODES.index("mlp_residual")
    expected = [*TEXT_NODES[:start], "moe.router", "moe.experts", "moe.shared_expert", *TEXT_NODES[end:]]
    assert names == expected + MTP_NODES


def test_nodes_without_layers_are_left_out():
    assert not [one for one in specify(CONFIGS["no attention"]).nodes if one.name.startswith("attn.")]
    assert not [one for one in specify(CONFIGS["no DeltaNet"]).nodes if one.name.startswith("gdn.")]


def test_node_names_are_those_of_the_models_scopes():
    """Else a profile, the recorder and this table would speak of different things."""
    source = "\n".join(path.read_text() for path in sorted((ROOT / "src" / "qwen35_jax").rglob("*.py")))
    scopes = set(re.findall(r'named_scope\(\s*"([^"]+)"', source))
    assert set(TEXT_NODES + MTP_NODES) <= scopes


def test_constants_that_no_field_sets_are_those_of_the_operations():
    core = node(specify(small("causal_dense")), "gdn.core").constants
    assert core["chunk"] == inspect.signature(gated_delta_rule).parameters["chunk_size"].default
    assert core["l2_eps"] == inspect.signature(l2_normalize).parameters["eps"].default
    assert core["scale"] == 16**-0.5


def test_formulas_follow_the_configuration():
    text = text_section(output_gate_type="sigmoid", linear_conv_kernel_dim=3, rms_norm_eps=1e-5)
    specification = specify(ModelConfig.from_hf(flat(text)))
    assert "sigmoid(z)" in node(specification, "gdn.norm").formula
    assert node(specification, "gdn.norm").constants["eps"] == 1e-5
    assert "t - 2" in node(specification, "gdn.conv").formula
    rope = {
        "rope_type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 100,
        "mrope_section": [3, 3, 2],
    }
    stretched = specify(ModelConfig.from_hf(flat(text_section(rope_parameters=rope))))
    assert node(stretched, "attn.rope").constants["factor"] == 4
    assert stretched.to_json()["max_context"] == 400
