"""Sections of a Hugging Face `config.json` to dataclasses, and changed fields back into a section.

A section is the JSON object that holds the fields: `text_config` or `vision_config`, or the whole file where
it is flat. Readers apply the defaults of the Hugging Face classes to absent (or null) fields that have one.
Fields that set the size of the model have none here: a file without them is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from qwen35_jax.config.checks import check_choice, check_integer, check_layer_count, refuse
from qwen35_jax.config.json_file import JsonObject
from qwen35_jax.config.text import LAYER_KINDS, MoEConfig, RopeConfig, TextConfig
from qwen35_jax.config.vision import VisionConfig
from qwen35_jax.errors import ConfigError

DEFAULT_FULL_ATTENTION_INTERVAL = 4

# Fields whose JSON value is the dataclass's value.
TEXT_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_num_value_heads",
    "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "max_position_embeddings",
    "initializer_range", "rms_norm_eps", "attention_bias", "attention_dropout", "bos_token_id",
    "pad_token_id",
)  # fmt: skip
ACTIVATION_FIELDS = ("hidden_act", "output_gate_type")
ROPE_FIELDS = tuple(field.name for field in dataclasses.fields(RopeConfig))
MOE_FIELDS = tuple(field.name for field in dataclasses.fields(MoEConfig))
VISION_FIELDS = tuple(field.name for field in dataclasses.fields(VisionConfig) if field.name != "rope_theta")
TEXT_SECTION_FIELDS = frozenset(
    {
        *TEXT_FIELDS,
        *ACTIVATION_FIELDS,
        *MOE_FIELDS,
        "layer_types",
        "full_attention_interval",
        "rope_parameters",
    }
    | {"rope_scaling", "rope_theta", "partial_rotary_factor", "mtp_num_hidden_layers", "eos_token_id"}
)
MTP_SPELLINGS = ("mtp_num_hidden_layers", "num_mtp_layers")

# What the architecture fixes: a file may say so, but not otherwise.
FIXED_TEXT_FIELDS: Mapping[str, tuple[object, ...]] = {
    "attn_output_gate": (True,),
    "mamba_ssm_dtype": ("float32",),
    "mtp_use_dedicated_embeddings": (False,),
    "use_sliding_window": (False,),
    "mrope_interleaved": (True,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], ()),
    "norm_topk_prob": (True,),
}


def require(section: Mapping[str, Any], field: str, expected: str = "a whole number") -> Any:
    """The value of a field that has no default."""
    if section.get(field) is None:
        raise ConfigError(f"{field}: missing, expected {expected}; add it, it sets the size of the model")
    return section[field]


def given(section: Mapping[str, Any], names: tuple[str, ...]) -> JsonObject:
    """Those of the named fields that are there and not null."""
    return {name: section[name] for name in names if section.get(name) is not None}


def same_value(field: str, values: Mapping[str, Any]) -> Any:
    """The one value that a field has in all the places where it stands; `values` maps place to value.

    Raises:
        ConfigError: two places disagree. None of them is taken silently.
    """
    (place, value), *others = values.items()
    for other_place, other in others:
        if other != value:
            refuse(
                field,
                other,
                f"{value!r} as in {place}",
                f"it also stands in {other_place}; keep one of the two",
            )
    return value


def read_text(section: Mapping[str, Any], *, sparse: bool) -> TextConfig:
    """Reads the language model's section.

    Args:
        section: the JSON object that holds the text fields.
        sparse: whether `model_type` names the mixture-of-experts architecture.

    Raises:
        ConfigError: a field is missing, invalid or contradicts another; the message begins with its name.
    """
    for field, allowed in FIXED_TEXT_FIELDS.items():
        if section.get(field) is not None and section[field] not in allowed:
            refuse(field, section[field], f"{allowed[0]!r}", "this architecture has no other form")
    fields = given(section, TEXT_FIELDS)
    for field in dataclasses.fields(TextConfig):
        derived = field.name in ("layer_types", "intermediate_size")
        if (
            field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
            and not derived
        ):
            require(section, field.name)
    if sparse:
        fields["moe"] = read_moe(section)
        fields["intermediate_size"] = None
    else:
        require(section, "intermediate_size")
        if section.get("num_experts"):
            refuse(
                "num_experts",
                section["num_experts"],
                "no experts in a dense model",
                "set model_type to the qwen3_5_moe kind, or drop the field",
            )
        fields["intermediate_size"] = section["intermediate_size"]
    for field in ACTIVATION_FIELDS:
        if section.get(field) is not None:
            # "swish" is the other name of the same function.
            fields[field] = "silu" if section[field] == "swish" else section[field]
    return TextConfig(
        **fields,
        layer_types=read_layer_types(section),
        rope=read_rope(section),
        mtp_num_hidden_layers=read_mtp_layers(section),
        eos_token_id=read_token_ids("eos_token_id", section.get("eos_token_id")),
    )


def read_layer_types(section: Mapping[str, Any]) -> tuple[Any, ...]:
    """The kind of each layer: `layer_types` where given, else full attention at every interval's end."""
    kinds = section.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, (list, tuple)):
            refuse("layer_types", kinds, "a list of layer kinds")
        return tuple(kinds)
    layers = section["num_hidden_layers"]
    check_layer_count("num_hidden_layers", layers)
    interval = section.get("full_attention_interval")
    interval = DEFAULT_FULL_ATTENTION_INTERVAL if interval is None else interval
    check_integer("full_attention_interval", interval)
    return tuple(
        "linear_attention" if (index + 1) % interval else "full_attention" for index in range(layers)
    )


def read_moe(section: Mapping[str, Any]) -> MoEConfig:
    for field in MOE_FIELDS[:-1]:
        require(section, field)
    return MoEConfig(**given(section, MOE_FIELDS))


def read_mtp_layers(section: Mapping[str, Any]) -> int:
    spellings = given(section, MTP_SPELLINGS)
    layers = same_value("mtp_num_hidden_layers", spellings) if spellings else 0
    kinds = section.get("mtp_layer_types")
    check_layer_count("mtp_num_hidden_layers", layers, minimum=0)
    if kinds is not None and (
        not isinstance(kinds, (list, tuple)) or list(kinds) != ["full_attention"] * layers
    ):
        refuse("mtp_layer_types", kinds, f"{layers} times 'full_attention'")
    return layers


def read_token_ids(field: str, value: object) -> tuple[int, ...]:
    """Token ids from JSON's null, one number, or a list."""
    if value is None:
        return ()
    if isinstance(value, (list, tuple)):
        return tuple(value)
    check_integer(field, value, minimum=0)
    return (value,)  # pyright: ignore[reportReturnType]


def read_rope(section: Mapping[str, Any]) -> RopeConfig:
    """Reads the rotary fields in either spelling, or in a mixture that does not contradict itself.

    New: all in `rope_parameters`. Old: `rope_theta` and `partial_rotary_factor` beside `rope_scaling`.
    """
    places: dict[str, Mapping[str, Any]] = {}
    for place in ("rope_parameters", "rope_scaling"):
        entries = section.get(place)
        if entries is None:
            continue
        if not isinstance(entries, Mapping):
            refuse(place, entries, "an object")
        for kind in LAYER_KINDS:
            if kind in entries:
                refuse(f"{place}.{kind}", entries[kind], "one set of rotary fields for all layers")
        check_interleaving(entries)
        places[place] = entries
    beside = given(section, ("rope_theta", "partial_rotary_factor"))
    if beside:
        places["the section itself"] = beside
    fields: JsonObject = {}
    for field in ROPE_FIELDS:
        spellings = ("rope_type", "type") if field == "rope_type" else (field,)
        values = {
            f"{place} ({spelling})" if spelling == "type" else place: entries[spelling]
            for place, entries in places.items()
            for spelling in spellings
            if entries.get(spelling) is not None
        }
        if values:
            fields[field] = same_value(field, values)
    if isinstance(fields.get("mrope_section"), list):
        fields["mrope_section"] = tuple(fields["mrope_section"])
    if fields.get("rope_type") == "yarn":
        limit = section.get("max_position_embeddings")
        limit = TextConfig.max_position_embeddings if limit is None else limit
        check_integer("max_position_embeddings", limit)
        if fields.get("factor") is None and fields.get("original_max_position_embeddings") is not None:
            original = fields["original_max_position_embeddings"]
            check_integer("original_max_position_embeddings", original)
            fields["factor"] = limit / original
        fields.setdefault("original_max_position_embeddings", limit)
    return RopeConfig(**fields)


def check_interleaving(entries: Mapping[str, Any]) -> None:
    if entries.get("mrope_interleaved") not in (None, True):
        refuse(
            "mrope_interleaved", entries["mrope_interleaved"], "true", "this architecture has no other form"
        )


def read_vision(section: Mapping[str, Any]) -> VisionConfig:
    """Reads the vision tower's section.

    Raises:
        ConfigError: a field is missing, invalid or contradicts another; the message begins with its name.
    """
    for field in dataclasses.fields(VisionConfig):
        if field.default is dataclasses.MISSING:
            require(section, field.name)
    fields = given(section, VISION_FIELDS)
    for field in ("patch_size", "temporal_patch_size"):
        # Written as a pair of equal numbers by some tools.
        if isinstance(fields.get(field), (list, tuple)):
            side, *others = fields[field] or [None]
            if side is None or any(other != side for other in others):
                refuse(field, fields[field], "one number, or equal ones", "only square patches are supported")
            fields[field] = side
    if section.get("deepstack_visual_indexes"):
        refuse(
            "deepstack_visual_indexes",
            section["deepstack_visual_indexes"],
            "[]",
            "this family has no deepstack",
        )
    rope = section.get("rope_parameters")
    if rope is not None:
        if not isinstance(rope, Mapping):
            refuse("rope_parameters", rope, "an object")
        check_choice("rope_parameters.rope_type", rope.get("rope_type", "axial"), ("axial", "default"))
        fields |= given(rope, ("rope_theta",))
    return VisionConfig(**fields)


def write_text(section: JsonObject, text: TextConfig, baseline: TextConfig | None) -> None:
    """Writes into `section` every field of `text` that differs from `baseline`, what the section says."""

    def changed(field: str) -> bool:
        return baseline is None or getattr(text, field) != getattr(baseline, field)

    for field in (*TEXT_FIELDS, *ACTIVATION_FIELDS):
        if changed(field) and not (field == "intermediate_size" and text.moe is not None):
            section[field] = getattr(text, field)
    if changed("layer_types"):
        section["layer_types"] = list(text.layer_types)
    if changed("eos_token_id"):
        ids = text.eos_token_id
        section["eos_token_id"] = None if not ids else ids[0] if len(ids) == 1 else list(ids)
    if changed("mtp_num_hidden_layers"):
        for spelling in given(section, MTP_SPELLINGS) or MTP_SPELLINGS[:1]:
            section[spelling] = text.mtp_num_hidden_layers
        if section.get("mtp_layer_types") is not None:
            section["mtp_layer_types"] = ["full_attention"] * text.mtp_num_hidden_layers
    # The original length of a stretched context may be left to follow from the limit: then say it.
    if changed("rope") or (changed("max_position_embeddings") and text.rope.rope_type == "yarn"):
        write_rope(section, text.rope)
    if changed("moe") and text.moe is not None:
        section.update(dataclasses.asdict(text.moe))


def write_rope(section: JsonObject, rope: RopeConfig) -> None:
    """Replaces the rotary fields, in the spelling that the section uses (the new one if it has none)."""
    old_spelling = section.get("rope_parameters") is None and (
        section.get("rope_scaling") is not None or section.get("rope_theta") is not None
    )
    kept = (section.get("rope_parameters") or {}) | (section.get("rope_scaling") or {})
    entries = {name: value for name, value in kept.items() if name not in (*ROPE_FIELDS, "type")}
    defaults = RopeConfig()
    always = ("rope_type", "rope_theta", "partial_rotary_factor", "mrope_section")
    for field in ROPE_FIELDS:
        value = getattr(rope, field)
        if field in always or value != getattr(defaults, field):
            entries[field] = list(value) if isinstance(value, tuple) else value
    for field in ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"):
        section.pop(field, None)
    if old_spelling:
        section["rope_theta"] = entries.pop("rope_theta")
        section["partial_rotary_factor"] = entries.pop("partial_rotary_factor")
        section["rope_scaling"] = entries
    else:
        section["rope_parameters"] = entries


def write_vision(section: JsonObject, vision: VisionConfig, baseline: VisionConfig | None) -> None:
    """Writes into `section` every field of `vision` that differs from `baseline`, what the section says."""
    for field in VISION_FIELDS:
        if baseline is None or getattr(vision, field) != getattr(baseline, field):
            section[field] = getattr(vision, field)
    if baseline is None or vision.rope_theta != baseline.rope_theta:
        section["rope_parameters"] = {
            **(section.get("rope_parameters") or {"rope_type": "axial"}),
            "rope_theta": vision.rope_theta,
        }
