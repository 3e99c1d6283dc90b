"""What a `config.json` may not say: every refusal names the field, what was found and what was expected."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from qwen35_jax.config import ModelConfig, RopeConfig, TextConfig
from qwen35_jax.config.hf_fields import FIXED_TEXT_FIELDS
from qwen35_jax.errors import ConfigError
from tests.config_files import DENSE_TEXT, MOE_FIELDS, VISION, flat, moe_section, nested, text_section

SIZES = [name for name in DENSE_TEXT if name != "rope_parameters"]


def refusal(data) -> str:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_hf(data)
    message = str(caught.value)
    assert "\n" not in message
    return message


def rope(**changes):
    return text_section(rope_parameters=DENSE_TEXT["rope_parameters"] | changes)


@pytest.mark.parametrize("name", SIZES)
def test_a_missing_size_is_refused(name):
    assert refusal(flat(text_section(**{name: None}))).startswith(f"{name}: missing")
    assert refusal(nested(text_section(**{name: None}))).startswith(f"text_config.{name}: missing")


@pytest.mark.parametrize("name", MOE_FIELDS)
def test_a_missing_expert_size_is_refused(name):
    data = flat(moe_section()) | {name: None}
    assert refusal(data).startswith(f"{name}: missing")


@pytest.mark.parametrize(
    "name", ["depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size"]
)
def test_a_missing_vision_size_is_refused(name):
    vision = {key: value for key, value in VISION.items() if key != name}
    assert refusal(nested(vision=vision)).startswith(f"vision_config.{name}: missing")


@pytest.mark.parametrize("value", [0, -4, 4.0, "4", True, [4]])
@pytest.mark.parametrize("name", [*SIZES, "linear_conv_kernel_dim", "max_position_embeddings"])
def test_a_size_is_a_positive_whole_number(name, value):
    message = refusal(flat(text_section(**{name: value})))
    assert message.startswith(f"{name}: found {value!r}, expected a whole number of at least 1")


FIELDS = {
    "heads not a multiple of kv heads": (
        {"num_attention_heads": 5},
        "num_attention_heads: found 5, expected a multiple of num_key_value_heads (2)",
    ),
    "value heads not a multiple of key heads": (
        {"linear_num_value_heads": 3},
        "linear_num_value_heads: found 3, expected a multiple of linear_num_key_heads (2)",
    ),
    "too few layer types": (
        {"layer_types": ["full_attention"] * 3},
        "layer_types: found '3 entries', expected one for each of num_hidden_layers (4)",
    ),
    "unknown layer type": (
        {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
        "layer_types[3]: found 'sliding_attention', expected 'linear_attention' or 'full_attention'",
    ),
    "layer types as text": ({"layer_types": "full_attention"}, "layer_types: found 'full_attention'"),
    "interval of zero": ({"full_attention_interval": 0}, "full_attention_interval: found 0"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act: found 'gelu', expected 'silu'"),
    "gate": ({"output_gate_type": 1}, "output_gate_type: found 1, expected 'silu' or 'sigmoid'"),
    "eps of zero": ({"rms_norm_eps": 0}, "rms_norm_eps: found 0, expected a finite number above 0"),
    "eps as text": ({"rms_norm_eps": "1e-6"}, "rms_norm_eps: found '1e-6', expected a finite number above 0"),
    "eps not a number": ({"rms_norm_eps": math.nan}, "rms_norm_eps: found nan"),
    "eps endless": ({"rms_norm_eps": math.inf}, "rms_norm_eps: found inf"),
    "eps beyond floats": ({"initializer_range": -(10**400)}, "initializer_range: found -1"),
    "initializer": ({"initializer_range": -0.1}, "initializer_range: found -0.1"),
    "bias": ({"attention_bias": 1}, "attention_bias: found 1, expected true or false"),
    "dropout": ({"attention_dropout": 1.0}, "attention_dropout: found 1.0, expected a probability below 1"),
    "end id": ({"eos_token_id": [3, -1]}, "eos_token_id: found -1"),
    "end id as text": ({"eos_token_id": "<|im_end|>"}, "eos_token_id: found '<|im_end|>'"),
    "pad id": ({"pad_token_id": 1.5}, "pad_token_id: found 1.5"),
    "no layers": (
        {"num_hidden_layers": 0},
        "num_hidden_layers: found 0, expected a whole number of at least 1",
    ),
    "a billion layers": (
        {"num_hidden_layers": 10**9},
        "num_hidden_layers: found 1000000000, expected at most 512",
    ),
    "a billion MTP layers": (
        {"mtp_num_hidden_layers": 10**9},
        "mtp_num_hidden_layers: found 1000000000, expected",
    ),
    "MTP kinds": ({"mtp_layer_types": 1}, "mtp_layer_types: found 1, expected 0 times"),
    "mtp": ({"mtp_num_hidden_layers": -1}, "mtp_num_hidden_layers: found -1"),
    "mtp twice": (
        {"mtp_num_hidden_layers": 1, "num_mtp_layers": 2},
        "mtp_num_hidden_layers: found 2, expected 1 as in mtp_num_hidden_layers",
    ),
    "mtp kinds": (
        {"num_mtp_layers": 1, "mtp_layer_types": ["linear_attention"]},
        "mtp_layer_types: found ['linear_attention']",
    ),
    "experts in a dense model": ({"num_experts": 6}, "num_experts: found 6, expected no experts in a dense"),
}


@pytest.mark.parametrize("case", FIELDS)
def test_an_invalid_text_field_is_refused_by_name(case):
    changes, message = FIELDS[case]
    section = text_section(**changes)
    assert refusal(flat(section) | {"model_type": "qwen3_5_text"}).startswith(message)
    assert refusal(nested(section) | {"model_type": "qwen3_5"}).startswith(f"text_config.{message}")


ROPES = {
    "unknown kind": (rope(rope_type="dynamic"), "rope_type: found 'dynamic', expected 'default' or 'yarn'"),
    "linear": (rope(rope_type="linear", factor=2.0), "rope_type: found 'linear'"),
    "two kinds": (rope(type="yarn"), "rope_type: found 'yarn', expected 'default' as in rope_parameters"),
    "factor without yarn": (
        rope(factor=4.0),
        "factor: found 4.0, expected no factor for rope_type 'default'",
    ),
    "yarn without factor": (rope(rope_type="yarn"), "factor: found None, expected a number of at least 1"),
    "yarn that shrinks": (rope(rope_type="yarn", factor=0.5), "factor: found 0.5"),
    "yarn betas": (rope(rope_type="yarn", factor=2, beta_fast=1, beta_slow=2), "beta_fast: found 1"),
    "yarn original": (
        rope(rope_type="yarn", factor=2, original_max_position_embeddings=0),
        "original_max_position_embeddings: found 0",
    ),
    "yarn original without factor": (
        rope(rope_type="yarn", original_max_position_embeddings=0),
        "original_max_position_embeddings: found 0",
    ),
    "yarn gain": (rope(rope_type="yarn", factor=2, attention_factor=-1), "attention_factor: found -1"),
    "yarn mscale": (rope(rope_type="yarn", factor=2, mscale="1"), "mscale: found '1'"),
    "yarn truncate": (rope(rope_type="yarn", factor=2, truncate=0), "truncate: found 0, expected true or"),
    "theta": (rope(rope_theta=-1.0), "rope_theta: found -1.0, expected a finite number above 0"),
    "share": (rope(partial_rotary_factor=1.5), "partial_rotary_factor: found 1.5"),
    "odd share": (
        rope(partial_rotary_factor=0.27),
        "partial_rotary_factor: found 0.27, expected a share that",
    ),
    "section sum": (rope(mrope_section=[3, 3, 3]), "mrope_section: found [3, 3, 3], expected a sum of 8"),
    "section too short for the head": (
        text_section(head_dim=512, rope_parameters={"mrope_section": [11, 11, 10]}),
        "mrope_section: found [11, 11, 10], expected a sum of 64",
    ),
    "section length": (rope(mrope_section=[4, 4]), "mrope_section: found (4, 4)"),
    "section entries": (rope(mrope_section=[4.0, 2, 2]), "mrope_section: found 4.0"),
    "sections apart": (rope(mrope_interleaved=False), "mrope_interleaved: found False"),
    "not an object": (text_section(rope_parameters=[1]), "rope_parameters: found [1], expected an object"),
    "one per layer kind": (
        text_section(rope_parameters={"full_attention": {"rope_theta": 1e7}}),
        "rope_parameters.full_attention: found {'rope_theta': 10000000.0}, expected one set",
    ),
}


@pytest.mark.parametrize("case", ROPES)
def test_b72_an_invalid_rotary_field_is_refused_by_name(case):
    section, message = ROPES[case]
    assert refusal(flat(section)).startswith(message)


@pytest.mark.parametrize("name", FIXED_TEXT_FIELDS)
def test_what_the_architecture_fixes_may_not_be_otherwise(name):
    allowed = FIXED_TEXT_FIELDS[name][0]
    other = {"mamba_ssm_dtype": "bfloat16", "mlp_only_layers": [0], "decoder_sparse_step": 2}.get(name)
    other = not allowed if other is None else other
    assert ModelConfig.from_hf(flat(moe_section(**{name: allowed}))).to_hf()[name] == allowed
    assert refusal(flat(moe_section(**{name: other}))).startswith(f"{name}: found {other!r}")


MOES = {
    "more chosen than there are": (
        {"num_experts_per_tok": 7},
        "num_experts_per_tok: found 7, expected at most",
    ),
    "no experts": ({"num_experts": 0}, "num_experts: found 0, expected a whole number of at least 1"),
    "loss weight": ({"router_aux_loss_coef": -0.1}, "router_aux_loss_coef: found -0.1"),
}


@pytest.mark.parametrize("case", MOES)
def test_an_invalid_expert_field_is_refused_by_name(case):
    changes, message = MOES[case]
    assert refusal(flat(moe_section(**changes))).startswith(message)


VISIONS = {
    "another width than the text model": (
        {"out_hidden_size": 3584},
        "out_hidden_size: found 3584, expected the",
    ),
    "heads": ({"num_heads": 5}, "hidden_size: found 48, expected a multiple of num_heads (5)"),
    "odd heads": ({"num_heads": 8}, "hidden_size: found 48, expected num_heads (8) times a multiple of 4"),
    "positions": ({"num_position_embeddings": 37}, "num_position_embeddings: found 37, expected a square"),
    "patch": ({"patch_size": [4, 8]}, "patch_size: found [4, 8], expected one number, or equal ones"),
    "patch of lists": ({"patch_size": [[4]]}, "patch_size: found [4], expected a whole number of at least 1"),
    "a billion blocks": ({"depth": 10**9}, "depth: found 1000000000, expected at most 512 layers"),
    "depth": ({"depth": True}, "depth: found True, expected a whole number of at least 1"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act: found 'gelu', expected 'gelu_pytorch_tanh'"),
    "deepstack": ({"deepstack_visual_indexes": [8]}, "deepstack_visual_indexes: found [8], expected []"),
    "rotary kind": ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type: found 'yarn'"),
    "rotary": ({"rope_parameters": 3}, "rope_parameters: found 3, expected an object"),
    "type": ({"model_type": "qwen3_vl"}, "model_type: found 'qwen3_vl', expected 'qwen3_5_vision'"),
}


@pytest.mark.parametrize("case", VISIONS)
def test_an_invalid_vision_field_is_refused_by_name(case):
    changes, message = VISIONS[case]
    assert refusal(nested(vision=VISION | changes)).startswith(f"vision_config.{message}")


FILES = {
    "no type": ({}, "model_type: found None, expected qwen3_5, qwen3_5_moe, qwen3_5_text"),
    "another model": (flat(model_type="llama"), "model_type: found 'llama'"),
    "a relative": (flat(model_type="qwen3_next"), "model_type: found 'qwen3_next', expected qwen3_5,"),
    "the next one": (
        nested() | {"model_type": "qwen4_exp"},
        "model_type: found 'qwen4_exp', expected qwen3_5,",
    ),
    "text type with a text section": (
        nested() | {"model_type": "qwen3_5_text"},
        "model_type: found 'qwen3_5_text', expected 'qwen3_5' beside a text_config",
    ),
    "text type with vision": (
        flat(vision_config=VISION),
        "model_type: found 'qwen3_5_text', expected 'qwen3_5'",
    ),
    "dense outside, sparse inside": (
        nested(text_section(model_type="qwen3_5_moe_text")),
        "text_config.model_type: found 'qwen3_5_moe_text', expected 'qwen3_5_text'",
    ),
    "text section": (nested() | {"text_config": [1]}, "text_config: found [1], expected an object"),
    "vision section": (nested() | {"vision_config": "yes"}, "vision_config: found 'yes', expected an object"),
    "quantized": (flat(quantization_config={"bits": 4}), "quantization_config: found a quantized checkpoint"),
    "quantized inside": (
        nested(text_section(quantization_config={"quant_method": "fp8"})),
        "quantization_config: found a quantized checkpoint",
    ),
    "tying": (flat(tie_word_embeddings="true"), "tie_word_embeddings: found 'true', expected true or false"),
    "dtype": (flat(dtype="int8"), "dtype: found 'int8', expected 'bfloat16' or 'float16' or"),
    "two dtypes": (
        flat(dtype="float32", torch_dtype="bfloat16"),
        "dtype: found 'bfloat16', expected 'float32' as in dtype",
    ),
    "placeholder": (nested(image_token_id=-1), "image_token_id: found -1, expected a whole number"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_contradictory_file_is_refused_by_name(case):
    data, message = FILES[case]
    assert refusal(data).startswith(message)


def test_empty_quantization_is_no_quantization():
    data = flat(quantization_config=None)
    assert ModelConfig.from_hf(data).to_hf() == data


def test_broken_json_is_refused_with_file_line_and_column(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{\n  "model_type": "qwen3_5",\n  "hidden_size": }\n')
    assert refusal(path) == f"{path}: line 3, column 18: not valid JSON (Expecting value); correct it"


def test_a_key_given_twice_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "qwen3_5_text", "head_dim": 64, "head_dim": 128}')
    assert refusal(path).startswith(f"{path}: head_dim: given twice")


def test_an_error_in_a_file_names_the_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(nested(text_section(hidden_size="96"))))
    assert refusal(tmp_path).startswith(f"{path}: text_config.hidden_size: found '96'")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"[1, 2]", "found list at the top"),
        (b"\xff\xfe", "cannot be read"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "99999999...: a number of 5000 digits"),
    ],
    ids=["no file", "list", "not text", "deep", "long number"],
)
def test_what_is_no_json_object_is_refused(tmp_path, content, message):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    found = refusal(tmp_path)
    assert found.startswith(str(path))
    assert message in found


def test_objects_made_in_python_are_checked_alike():
    text = ModelConfig.from_hf(flat()).text
    with pytest.raises(ConfigError, match=r"^layer_types: found '4 entries'"):
        dataclasses.replace(text, num_hidden_layers=8)
    with pytest.raises(ConfigError, match=r"^original_max_position_embeddings: found None"):
        RopeConfig(rope_type="yarn", factor=2.0)
    with pytest.raises(ConfigError, match=r"^intermediate_size: found 112, expected nothing"):
        dataclasses.replace(ModelConfig.from_hf(flat(moe_section())).text, intermediate_size=112)
    fields = {field.name: getattr(text, field.name) for field in dataclasses.fields(text)}
    with pytest.raises(ConfigError, match=r"^eos_token_id: found 3"):
        TextConfig(**(fields | {"eos_token_id": 3}))
