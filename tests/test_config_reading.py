"""Reading a Hugging Face `config.json`: layouts, spellings, defaults."""

from __future__ import annotations

import dataclasses
import json

import pytest

from qwen35_jax.config import ModelConfig, RopeConfig, TextConfig, require_dense_text
from qwen35_jax.errors import ConfigError
from tests.config_files import VISION, flat, moe_section, nested, text_section


def read_text(section) -> TextConfig:
    return ModelConfig.from_hf(flat(section)).text


# What test_b32 gives in every layout and spelling.
B32_THETA, B32_SHARE, B32_SECTION = 5_000_000.0, 0.5, [6, 5, 5]
B32_NEW = {
    "rope_type": "default",
    "rope_theta": B32_THETA,
    "partial_rotary_factor": B32_SHARE,
    "mrope_section": B32_SECTION,
}
B32_SPELLINGS = {
    "rope_parameters": {"rope_parameters": B32_NEW},
    "rope_scaling": {
        "rope_theta": B32_THETA,
        "partial_rotary_factor": B32_SHARE,
        "rope_scaling": {"type": "default", "mrope_section": B32_SECTION},
    },
    "rope_scaling with everything": {"rope_scaling": B32_NEW},
    "theta beside rope_parameters": {
        "rope_theta": B32_THETA,
        "rope_parameters": {"partial_rotary_factor": B32_SHARE, "mrope_section": B32_SECTION},
    },
    "equal duplicates": {
        "rope_theta": B32_THETA,
        "partial_rotary_factor": B32_SHARE,
        "rope_parameters": B32_NEW,
        "rope_scaling": {"rope_type": "default"},
    },
}


@pytest.mark.parametrize("spelling", B32_SPELLINGS)
@pytest.mark.parametrize("layout", ["flat text", "flat composite", "nested", "nested without vision"])
def test_b32_same_values_in_any_layout_and_spelling_are_the_same_model(layout, spelling):
    section = text_section(**({"rope_parameters": None} | B32_SPELLINGS[spelling]))
    data = {
        "flat text": flat(section),
        "flat composite": flat(section) | {"model_type": "qwen3_5"},
        "nested": nested(section),
        "nested without vision": nested(section, vision=None),
    }[layout]
    config = ModelConfig.from_hf(data)
    expected = ModelConfig.from_hf(flat(text_section(rope_parameters=B32_NEW)))
    assert config.text == expected.text
    assert config.text.rope == RopeConfig(
        rope_theta=B32_THETA, partial_rotary_factor=B32_SHARE, mrope_section=(6, 5, 5)
    )
    assert dataclasses.replace(config, vision=None) == expected
    assert config.to_hf() == data


def test_b32_head_dim_is_read_and_not_derived():
    text = read_text(text_section())
    assert (text.hidden_size, text.num_attention_heads, text.head_dim, text.rotary_dim) == (96, 4, 64, 16)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (flat(text_section(rope_theta=1e4)), "rope_theta: found 10000.0, expected 10000000.0 as in rope_par"),
        (flat(text_section(partial_rotary_factor=0.5)), "partial_rotary_factor: found 0.5, expected 0.25"),
        (flat(text_section(rope_scaling={"rope_type": "yarn", "factor": 4.0})), "rope_type: found 'yarn'"),
        (nested(head_dim=128), "head_dim: found 128, expected what text_config says (64)"),
        (nested(rope_theta=1e4), "rope_theta: found 10000.0, expected what text_config says"),
        (nested(attention_bias=True), "attention_bias: found True"),
        (nested(full_attention_interval=2), "full_attention_interval: found 2"),
        (nested(num_key_value_heads=3), "num_key_value_heads: found 3, expected what text_config says (2)"),
    ],
)
def test_b32_conflicting_duplicates_are_refused(data, message):
    with pytest.raises(ConfigError) as refusal:
        ModelConfig.from_hf(data)
    assert message in str(refusal.value)


def test_b32_agreeing_duplicates_and_generation_ids_at_the_top_are_fine():
    data = nested(text_section(eos_token_id=7), vocab_size=640, attention_bias=False, eos_token_id=9)
    config = ModelConfig.from_hf(data)
    assert config.text.eos_token_id == (7,)
    assert config.to_hf() == data


@pytest.mark.parametrize(
    ("given", "read"), [(None, "silu"), ("silu", "silu"), ("swish", "silu"), ("sigmoid", "sigmoid")]
)
def test_b30_output_gate_type_is_read_and_silu_when_absent(given, read):
    assert read_text(text_section(output_gate_type=given)).output_gate_type == read


def test_b30_unknown_output_gate_type_is_refused():
    with pytest.raises(ConfigError, match=r"^output_gate_type: found 'tanh', expected 'silu' or 'sigmoid'"):
        read_text(text_section(output_gate_type="tanh"))


@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_b48_the_top_level_flag_ties_a_vision_language_model(root, inner):
    data = nested(text_section(tie_word_embeddings=inner), tie_word_embeddings=root)
    config = ModelConfig.from_hf(data)
    assert config.tie_word_embeddings is root
    assert config.to_hf() == data


@pytest.mark.parametrize("tied", [True, False])
def test_b48_the_only_flag_ties_a_text_model(tied):
    assert ModelConfig.from_hf(flat(tie_word_embeddings=tied)).tie_word_embeddings is tied
    section = text_section(tie_word_embeddings=tied)
    assert ModelConfig.from_hf(nested(section, vision=None)).tie_word_embeddings is tied


def test_b48_models_are_untied_without_a_flag_where_the_reference_looks_for_it():
    assert ModelConfig.from_hf(flat()).tie_word_embeddings is False
    assert ModelConfig.from_hf(nested(text_section(tie_word_embeddings=True))).tie_word_embeddings is False


@pytest.mark.parametrize("flip", [True, False])
def test_b48_a_changed_flag_is_written_where_every_reader_looks(flip):
    data = nested(text_section(tie_word_embeddings=flip), tie_word_embeddings=not flip)
    written = dataclasses.replace(ModelConfig.from_hf(data), tie_word_embeddings=flip).to_hf()
    assert written["tie_word_embeddings"] is flip
    assert written["text_config"]["tie_word_embeddings"] is flip


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262_144}
LONG_ROPE = {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2]}
YARN_SPELLINGS = {
    "rope_parameters": {"rope_parameters": LONG_ROPE | YARN},
    "rope_scaling": {
        "rope_parameters": None,
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "rope_scaling": YARN | {"mrope_section": [3, 3, 2]},
    },
}


@pytest.mark.parametrize("spelling", YARN_SPELLINGS)
@pytest.mark.parametrize(
    ("limit", "context"), [(262_144, 1_048_576), (1_010_000, 1_010_000), (131_072, 131_072)]
)
def test_b72_b73_context_is_factor_times_the_original_unless_capped(spelling, limit, context):
    text = read_text(text_section(max_position_embeddings=limit, **YARN_SPELLINGS[spelling]))
    assert text.rope == RopeConfig(
        rope_type="yarn",
        rope_theta=1e7,
        mrope_section=(3, 3, 2),
        factor=4.0,
        original_max_position_embeddings=262_144,
    )
    assert text.max_context == context


def test_b72_without_yarn_the_context_is_the_files_limit():
    assert read_text(text_section(max_position_embeddings=5000)).max_context == 5000


def test_b73_yarn_fields_left_out_follow_from_the_limit():
    no_original = LONG_ROPE | {"rope_type": "yarn", "factor": 2.0}
    text = read_text(text_section(max_position_embeddings=3000, rope_parameters=no_original))
    assert (text.rope.original_max_position_embeddings, text.max_context) == (3000, 6000)
    no_factor = LONG_ROPE | {"rope_type": "yarn", "original_max_position_embeddings": 2000}
    text = read_text(text_section(max_position_embeddings=5000, rope_parameters=no_factor))
    assert (text.rope.factor, text.max_context) == (2.5, 5000)


def test_layer_types_win_over_the_interval():
    kinds = ["full_attention", "linear_attention", "linear_attention", "linear_attention"]
    text = read_text(text_section(layer_types=kinds, full_attention_interval=4))
    assert text.layer_types == tuple(kinds)


@pytest.mark.parametrize(("interval", "full"), [(None, (3,)), (2, (1, 3)), (1, (0, 1, 2, 3)), (5, ())])
def test_the_interval_decides_only_where_layer_types_are_absent(interval, full):
    text = read_text(text_section(full_attention_interval=interval))
    found = tuple(i for i, kind in enumerate(text.layer_types) if kind == "full_attention")
    assert found == full


def test_absent_fields_take_the_reference_defaults():
    text = read_text(text_section(rope_parameters=None))
    assert text.rope == RopeConfig()
    assert text.rope.rope_theta == 10_000.0
    assert text.rope.mrope_section == (11, 11, 10)  # reaches past this small head's 8 frequencies
    assert text.rms_norm_eps == 1e-6
    assert text.linear_conv_kernel_dim == 4
    assert text.max_position_embeddings == 32_768
    assert text.attention_bias is False
    assert text.mtp_num_hidden_layers == 0
    config = ModelConfig.from_hf(nested())
    assert (config.image_token_id, config.video_token_id) == (248_056, 248_057)
    assert (config.vision_start_token_id, config.vision_end_token_id) == (248_053, 248_054)


@pytest.mark.parametrize(("given", "read"), [(None, ()), (3, (3,)), ([4, 2], (4, 2)), ([], ())])
def test_end_ids_are_none_one_or_several(given, read):
    assert read_text(text_section(eos_token_id=given)).eos_token_id == read


def test_mtp_layers_are_read_in_both_spellings():
    assert read_text(text_section(mtp_num_hidden_layers=1)).mtp_num_hidden_layers == 1
    both = text_section(num_mtp_layers=1, mtp_layer_types=["full_attention"])
    assert read_text(both).mtp_num_hidden_layers == 1


def test_vision_fields_are_read_and_early_type_names_accepted():
    for inner in ("qwen3_5_vision", "qwen3_5"):
        vision = VISION | {"model_type": inner, "temporal_patch_size": [2, 2], "deepstack_visual_indexes": []}
        data = nested(vision=vision)
        config = ModelConfig.from_hf(data)
        assert config.vision is not None
        assert (config.vision.head_dim, config.vision.position_grid) == (12, 6)
        assert config.vision.temporal_patch_size == 2
        assert config.to_hf() == data


@pytest.mark.parametrize(
    ("data", "dtype"),
    [
        (flat(), None),
        (flat(dtype="float32"), "float32"),
        (flat(torch_dtype="bfloat16"), "bfloat16"),
        (nested(text_section(dtype="bfloat16")), "bfloat16"),
        (nested(text_section(dtype="float32"), dtype="bfloat16"), "bfloat16"),
    ],
)
def test_the_files_dtype_is_read_in_both_spellings_and_at_both_levels(data, dtype):
    config = ModelConfig.from_hf(data)
    assert config.dtype == dtype
    assert config.to_hf() == data


def test_a_mixture_of_experts_is_parsed_but_not_built():
    config = ModelConfig.from_hf(flat(moe_section()))
    assert config.text.moe is not None
    assert (config.text.moe.num_experts, config.text.moe.num_experts_per_tok) == (6, 2)
    assert config.text.intermediate_size is None
    for given in (config, config.text):
        with pytest.raises(ConfigError, match="num_experts: found 6, expected a dense model"):
            require_dense_text(given)
    dense = ModelConfig.from_hf(flat())
    assert require_dense_text(dense) is dense.text


def test_a_configuration_can_be_a_static_argument():
    one, two = ModelConfig.from_hf(flat()), ModelConfig.from_hf(flat())
    assert hash(one) == hash(two)
    assert one == two
    assert one != dataclasses.replace(one, tie_word_embeddings=True)


@pytest.mark.parametrize("place", ["folder", "file", "string"])
def test_a_path_may_be_the_folder_or_the_file(tmp_path, place):
    (tmp_path / "config.json").write_text(json.dumps(nested()))
    path = {"folder": tmp_path, "file": tmp_path / "config.json", "string": str(tmp_path)}[place]
    assert ModelConfig.from_hf(path) == ModelConfig.from_hf(nested())
