"""Small `config.json` contents in the family's layouts, for the tests of everything that reads one."""

from __future__ import annotations

import copy
from typing import Any

JsonObject = dict[str, Any]

DENSE_TEXT: JsonObject = {
    "vocab_size": 640,
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
MOE_FIELDS: JsonObject = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}
VISION: JsonObject = {
    "depth": 2,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_heads": 4,
    "patch_size": 4,
    "num_position_embeddings": 36,
    "out_hidden_size": 96,
}


def text_section(**changes: Any) -> JsonObject:
    """The language model's fields; a change to None takes the field out."""
    return _changed(DENSE_TEXT, changes)


def moe_section(**changes: Any) -> JsonObject:
    sparse = {name: value for name, value in DENSE_TEXT.items() if name != "intermediate_size"}
    return _changed(sparse | MOE_FIELDS, changes)


def flat(section: JsonObject | None = None, **beside: Any) -> JsonObject:
    """A text-only file."""
    section = text_section() if section is None else section
    family = "qwen3_5_moe" if "num_experts" in section else "qwen3_5"
    return {"model_type": f"{family}_text", **section, **beside}


def nested(
    section: JsonObject | None = None, *, vision: JsonObject | None = VISION, **beside: Any
) -> JsonObject:
    """A vision-language file."""
    section = text_section() if section is None else section
    family = "qwen3_5_moe" if "num_experts" in section else "qwen3_5"
    data: JsonObject = {"model_type": family, "text_config": section, **beside}
    if vision is not None:
        data["vision_config"] = copy.deepcopy(vision)
    return data


def _changed(base: JsonObject, changes: JsonObject) -> JsonObject:
    section = copy.deepcopy(base) | changes
    return {name: value for name, value in section.items() if value is not None}
