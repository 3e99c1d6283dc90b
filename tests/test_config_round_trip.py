"""A `config.json` read and written back is the same file, and a changed one says what was changed."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from qwen35_jax.config import ModelConfig, MoEConfig, RopeConfig, TextConfig, VisionConfig
from qwen35_jax.errors import ConfigError
from tests.config_files import VISION, flat, moe_section, nested, text_section

JsonObject = dict[str, Any]
# A failing file is shown as found: shrinking one takes minutes.
quick = settings(max_examples=50, phases=[Phase.explicit, Phase.generate])

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
unknown_keys = st.dictionaries(st.text(max_size=4).map("x_{}".format), json_values, max_size=2)
small = st.integers(1, 6)


def some_of(draw: st.DrawFn, fields: dict[str, st.SearchStrategy[Any]]) -> JsonObject:
    """Any of the fields, any of them null."""
    chosen = draw(st.sets(st.sampled_from(sorted(fields))))
    return {name: draw(st.none() | fields[name]) for name in sorted(chosen)}


@st.composite
def rotary_fields(draw: st.DrawFn, half: int) -> JsonObject:
    """The rotary fields of a section whose heads have `4 * half * 2` dimensions, in any spelling."""
    first = draw(st.integers(0, half))
    second = draw(st.integers(0, half - first))
    theta = draw(st.sampled_from([10_000.0, 10_000_000, 5e5]))
    inner: JsonObject = draw(unknown_keys) | {"mrope_section": [first, second, half - first - second]}
    beside: JsonObject = {}
    if draw(st.booleans()):
        inner |= {draw(st.sampled_from(["rope_type", "type"])): "default"}
    else:
        inner |= {
            draw(st.sampled_from(["rope_type", "type"])): "yarn",
            "factor": draw(st.sampled_from([2, 4.0])),
        }
        inner |= some_of(
            draw,
            {
                "original_max_position_embeddings": st.integers(1, 10**6),
                "beta_fast": st.floats(8, 64),
                "beta_slow": st.floats(0.5, 2),
                "attention_factor": st.floats(0.5, 2),
                "mscale": st.floats(0, 2),
                "mscale_all_dim": st.floats(0, 2),
                "truncate": st.booleans(),
            },
        )
    for name, value in (("rope_theta", theta), ("partial_rotary_factor", 0.25)):
        places = draw(st.sampled_from([(inner,), (beside,), (inner, beside)]))
        for place in places:
            place[name] = value
    spelling = draw(st.sampled_from(["rope_parameters", "rope_scaling", "both"]))
    if spelling == "both":
        return beside | {"rope_parameters": inner, "rope_scaling": copy.deepcopy(inner)}
    other = {"rope_parameters": "rope_scaling", "rope_scaling": "rope_parameters"}[spelling]
    return beside | {spelling: inner} | ({other: None} if draw(st.booleans()) else {})


@st.composite
def text_sections(draw: st.DrawFn) -> JsonObject:
    layers, half = draw(small), draw(st.integers(1, 4))
    kv_heads, key_heads = draw(small), draw(small)
    section: JsonObject = {
        "vocab_size": draw(st.integers(1, 10**6)),
        "hidden_size": draw(small),
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * draw(small),
        "num_key_value_heads": kv_heads,
        "head_dim": 8 * half,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw(small),
        "linear_key_head_dim": draw(small),
        "linear_value_head_dim": draw(small),
    }
    if draw(st.booleans()):
        section |= {"intermediate_size": draw(small)}
    else:
        experts = draw(small)
        section |= {
            "num_experts": experts,
            "num_experts_per_tok": draw(st.integers(1, experts)),
            "moe_intermediate_size": draw(small),
            "shared_expert_intermediate_size": draw(small),
        }
        section |= some_of(
            draw, {"router_aux_loss_coef": st.floats(0, 1), "output_router_logits": st.booleans()}
        )
    kinds = st.sampled_from(["linear_attention", "full_attention"])
    section |= some_of(
        draw,
        {
            "linear_conv_kernel_dim": small,
            "max_position_embeddings": st.integers(1, 10**6),
            "initializer_range": st.floats(0, 1),
            "rms_norm_eps": st.floats(1e-9, 1e-3),
            "attention_bias": st.booleans(),
            "attention_dropout": st.floats(0, 0.5),
            "hidden_act": st.sampled_from(["silu", "swish"]),
            "output_gate_type": st.sampled_from(["silu", "swish", "sigmoid"]),
            "layer_types": st.lists(kinds, min_size=layers, max_size=layers),
            "full_attention_interval": small,
            "mtp_num_hidden_layers": st.just(1),
            "num_mtp_layers": st.just(1),
            "bos_token_id": small,
            "pad_token_id": small,
            "eos_token_id": small | st.lists(small, max_size=3),
            "tie_word_embeddings": st.booleans(),
            "attn_output_gate": st.just(True),
            "use_cache": st.booleans(),
        },
    )
    section |= draw(rotary_fields(half)) if draw(st.booleans()) else {}
    return _shuffled(draw, section | draw(unknown_keys))


@st.composite
def config_files(draw: st.DrawFn) -> JsonObject:
    section = draw(text_sections())
    family = "qwen3_5_moe" if "num_experts" in section else "qwen3_5"
    beside = draw(unknown_keys) | some_of(
        draw,
        {
            "architectures": st.just(["Anything"]),
            "tie_word_embeddings": st.booleans(),
            "dtype": st.sampled_from(["bfloat16", "float32"]),
            "transformers_version": st.just("5.24.0"),
        },
    )
    layout = draw(st.sampled_from(["text", "flat", "nested", "vision"]))
    if layout in ("text", "flat"):
        model_type = f"{family}_text" if layout == "text" else family
        return _shuffled(draw, section | beside | {"model_type": model_type})
    if draw(st.booleans()):
        section["model_type"] = f"{family}_text"
    if draw(st.booleans()):
        section["dtype"] = "float16"
    beside |= {
        name: section[name]
        for name in draw(st.sets(st.sampled_from(sorted(section))))
        if name in COPIED_TO_THE_TOP
    }
    beside |= {"model_type": family, "text_config": section}
    if layout == "vision":
        beside |= {"image_token_id": draw(small)}
        beside["vision_config"] = _shuffled(draw, draw(vision_sections(section["hidden_size"], family)))
    return _shuffled(draw, beside)


COPIED_TO_THE_TOP = {"vocab_size", "hidden_size", "num_hidden_layers", "rms_norm_eps", "eos_token_id"}


@st.composite
def vision_sections(draw: st.DrawFn, out: int, family: str) -> JsonObject:
    heads = draw(small)
    sizes = {"depth": draw(small), "num_heads": heads, "hidden_size": heads * 4 * draw(small)}
    sizes |= {"intermediate_size": draw(small), "out_hidden_size": out}
    optional = {
        "model_type": st.sampled_from([f"{family}_vision", family]),
        "patch_size": small | small.map(lambda side: [side, side]),
        "temporal_patch_size": small,
        "spatial_merge_size": small,
        "num_position_embeddings": small.map(lambda side: side**2),
        "in_channels": small,
        "initializer_range": st.floats(0, 1),
        "rope_parameters": st.sampled_from([{"rope_type": "axial", "rope_theta": 500.0}, {"rope_theta": 10}]),
    }
    return sizes | some_of(draw, optional) | draw(unknown_keys)


def _shuffled(draw: st.DrawFn, entries: JsonObject) -> JsonObject:
    return {name: entries[name] for name in draw(st.permutations(list(entries)))}


@quick
@given(config_files())
def test_every_file_comes_back_as_it_was(data):
    given_data = copy.deepcopy(data)
    config = ModelConfig.from_hf(data)
    written = config.to_hf()
    assert data == given_data, "reading changed its argument"
    assert json.dumps(written) == json.dumps(data), "same keys, values and order"
    assert ModelConfig.from_hf(written) == config
    written.clear()
    assert config.to_hf() == data, "the written object is the caller's own"


@quick
@given(config_files())
def test_without_its_source_a_configuration_writes_a_file_that_says_the_same(data):
    config = dataclasses.replace(ModelConfig.from_hf(data), source=None)
    again = ModelConfig.from_hf(json.loads(json.dumps(config.to_hf())))
    assert again == config
    assert again.model_type == config.model_type


CHANGED_TEXT = {
    "vocab_size": 11,
    "linear_conv_kernel_dim": 9,
    "max_position_embeddings": 777,
    "initializer_range": 0.5,
    "rms_norm_eps": 0.25,
    "attention_bias": True,
    "attention_dropout": 0.75,
    "output_gate_type": "sigmoid",
    "mtp_num_hidden_layers": 0,
    "bos_token_id": 8,
    "eos_token_id": (9, 8),
    "pad_token_id": None,
}


@quick
@given(config_files(), st.sets(st.sampled_from(sorted(CHANGED_TEXT)), min_size=1), st.booleans())
def test_changes_are_written_into_the_file_and_the_rest_stays(data, names, also_rope):
    before = ModelConfig.from_hf(data)
    text = dataclasses.replace(before.text, **{name: CHANGED_TEXT[name] for name in names})
    if also_rope:
        text = dataclasses.replace(text, rope=dataclasses.replace(text.rope, rope_theta=123.0))
    config = dataclasses.replace(
        before, text=text, tie_word_embeddings=not before.tie_word_embeddings, dtype="float64"
    )
    written = config.to_hf()
    assert ModelConfig.from_hf(written) == config
    assert _unknown(written) == _unknown(data)


def _unknown(data: Any) -> list[tuple[str, str]]:
    """Every unknown key of the file with its value, but for its depth."""
    found = []
    for name, value in data.items():
        if name.startswith("x_"):
            found.append((name, json.dumps(value)))
        elif name in ("text_config", "vision_config", "rope_parameters", "rope_scaling") and value:
            found += _unknown(value)
    return sorted(set(found))


@pytest.mark.parametrize("dtype", ["dtype", "torch_dtype"])
def test_a_changed_dtype_is_written_at_every_level_in_the_files_spelling(dtype):
    data = nested(text_section(**{dtype: "bfloat16"}), **{dtype: "bfloat16"})
    written = dataclasses.replace(ModelConfig.from_hf(data), dtype="float32").to_hf()
    assert written == data | {dtype: "float32", "text_config": data["text_config"] | {dtype: "float32"}}


def test_old_rotary_spelling_stays_old_when_a_value_changes():
    old = {"rope_theta": 1e7, "rope_scaling": {"type": "default", "mrope_section": [3, 3, 2], "x": 1}}
    config = ModelConfig.from_hf(flat(text_section(rope_parameters=None, **old)))
    rope = dataclasses.replace(config.text.rope, rope_theta=5.0)
    written = dataclasses.replace(config, text=dataclasses.replace(config.text, rope=rope)).to_hf()
    assert "rope_parameters" not in written
    assert written["rope_theta"] == 5.0
    assert written["rope_scaling"] == {"rope_type": "default", "mrope_section": [3, 3, 2], "x": 1}


def test_changed_vision_and_expert_fields_are_written():
    config = ModelConfig.from_hf(nested(moe_section()))
    assert config.vision is not None
    assert config.text.moe is not None
    text = dataclasses.replace(config.text, moe=dataclasses.replace(config.text.moe, num_experts_per_tok=3))
    vision = dataclasses.replace(config.vision, depth=5, rope_theta=77.0)
    changed = dataclasses.replace(config, text=text, vision=vision, image_token_id=99)
    written = changed.to_hf()
    assert ModelConfig.from_hf(written) == changed
    assert written["vision_config"]["depth"] == 5
    assert written["text_config"]["num_experts_per_tok"] == 3
    assert written["image_token_id"] == 99


def test_the_vision_tower_can_be_taken_out():
    config = dataclasses.replace(ModelConfig.from_hf(nested()), vision=None)
    written = config.to_hf()
    assert written == nested(vision=None)
    assert ModelConfig.from_hf(written) == config


def test_a_vision_tower_can_be_put_into_a_nested_file():
    bare = ModelConfig.from_hf(nested(vision=None))
    vision = ModelConfig.from_hf(nested()).vision
    config = dataclasses.replace(bare, vision=vision)
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_a_change_that_the_layout_cannot_hold_is_refused():
    config = ModelConfig.from_hf(flat())
    vision = VisionConfig(**VISION)
    with pytest.raises(ConfigError, match="model_type: found 'qwen3_5_text' in the file"):
        dataclasses.replace(config, vision=vision).to_hf()
    sparse = dataclasses.replace(config.text, intermediate_size=None, moe=MoEConfig(6, 2, 40, 56))
    with pytest.raises(ConfigError, match=r"dataclasses\.replace"):
        dataclasses.replace(config, text=sparse).to_hf()
    anew = dataclasses.replace(config, text=sparse, vision=vision, source=None)
    assert anew.to_hf()["model_type"] == "qwen3_5_moe"
    assert ModelConfig.from_hf(anew.to_hf()) == anew


def test_fields_of_a_file_and_of_the_dataclasses_have_the_same_names():
    written = dataclasses.replace(ModelConfig.from_hf(nested(moe_section())), source=None).to_hf()
    section = written["text_config"]
    fields = {field.name for field in dataclasses.fields(TextConfig)}
    fields |= {field.name for field in dataclasses.fields(MoEConfig)}
    assert fields - section.keys() == {"moe", "rope", "intermediate_size", "unroll_layers"}
    rope = {field.name for field in dataclasses.fields(RopeConfig)}
    assert section["rope_parameters"].keys() <= rope
