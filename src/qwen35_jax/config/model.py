"""A whole checkpoint's configuration, read from and written back to a Hugging Face `config.json`."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from qwen35_jax.config.checks import check_choice, check_flag, check_integer, refuse
from qwen35_jax.config.hf_fields import (
    TEXT_SECTION_FIELDS,
    read_text,
    read_vision,
    same_value,
    write_text,
    write_vision,
)
from qwen35_jax.config.json_file import JsonObject, load_json
from qwen35_jax.config.text import TextConfig
from qwen35_jax.config.vision import VisionConfig
from qwen35_jax.errors import ConfigError

COMPOSITE_TYPES = ("qwen3_5", "qwen3_5_moe")
TEXT_TYPES = ("qwen3_5_text", "qwen3_5_moe_text")
MODEL_TYPES = COMPOSITE_TYPES + TEXT_TYPES
# Near relatives whose files look alike, and why they are refused.
OTHER_ARCHITECTURES: Mapping[str, str] = {
    "qwen3_next": "Qwen3-Next lays its projections out per key head; convert the weights to Qwen3.5 first",
    "qwen4_exp": "it is another architecture (hyper-connections, n-gram embeddings, sparse attention)",
    "qwen4_exp_text": "it is another architecture (hyper-connections, n-gram embeddings, sparse attention)",
}
SPECIAL_TOKENS: Mapping[str, int] = {
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
}
DTYPES = ("bfloat16", "float16", "float32", "float64")
DTYPE_SPELLINGS = ("dtype", "torch_dtype")
# In the nested layout these may stand at the top with another value: they describe the file or steer
# generation, and tools write them there.
FREE_AT_THE_TOP = frozenset(
    {"model_type", "architectures", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range"}
)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A whole checkpoint: the text model, and what stands beside it.

    Two configurations are equal when they describe the same model, whichever layout their files use.

    Attributes:
        text: the language model.
        tie_word_embeddings: whether the output head is the embedding table. In the nested (vision-language)
            layout the top-level flag decides, as it does for the Hugging Face class; in a flat file there is
            only one.
        vision: the vision tower, None for a text-only model.
        image_token_id, video_token_id, vision_start_token_id, vision_end_token_id: placeholder tokens of the
            vision-language layout.
        dtype: the type of most tensors in the file, as the file says ("bfloat16"); None where it says
            nothing. The type to compute in is a choice at run time and not part of this.
        source: the JSON object that this was read from. `to_hf` writes changed fields into a copy of it, so
            that layout, spelling and unknown keys survive.
    """

    text: TextConfig
    tie_word_embeddings: bool = False
    vision: VisionConfig | None = None
    image_token_id: int = SPECIAL_TOKENS["image_token_id"]
    video_token_id: int = SPECIAL_TOKENS["video_token_id"]
    vision_start_token_id: int = SPECIAL_TOKENS["vision_start_token_id"]
    vision_end_token_id: int = SPECIAL_TOKENS["vision_end_token_id"]
    dtype: Literal["bfloat16", "float16", "float32", "float64"] | None = None
    source: Mapping[str, Any] | None = dataclasses.field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_flag("tie_word_embeddings", self.tie_word_embeddings)
        for field in SPECIAL_TOKENS:
            check_integer(field, getattr(self, field), minimum=0)
        if self.dtype is not None:
            check_choice("dtype", self.dtype, DTYPES)
        if self.vision is not None and self.vision.out_hidden_size != self.text.hidden_size:
            refuse(
                "vision_config.out_hidden_size",
                self.vision.out_hidden_size,
                f"the language model's hidden_size ({self.text.hidden_size})",
                "correct one of the two",
            )

    @property
    def model_type(self) -> str:
        """The Hugging Face name of the architecture and layout."""
        if self.source is not None:
            return self.source["model_type"]
        family = "qwen3_5" if self.text.moe is None else "qwen3_5_moe"
        return family if self.vision is not None else f"{family}_text"

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> ModelConfig:
        """Reads a Hugging Face configuration, text-only or vision-language, flat or nested.

        A value may stand in several places: rotary fields in the old and the new spelling, text fields at the
        top of a nested file, `dtype` and `torch_dtype`. It is read where the Hugging Face classes read it, and
        a place that says otherwise is refused, because another tool might believe that one. Exempt are the
        token ids and `initializer_range` at the top of a nested file, where its `text_config` wins, and
        `tie_word_embeddings` and `dtype` inside one, where the top wins. `layer_types` wins over
        `full_attention_interval`.

        Args:
            source: the JSON object, or the path of a `config.json` or of the folder that holds it.

        Raises:
            ConfigError: the file cannot be read, or a field is missing, invalid, unsupported or contradicts
                another.
        """
        if isinstance(source, Mapping):
            return _read(dict(source))
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        data = load_json(path)
        try:
            return _read(data)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def to_hf(self) -> JsonObject:
        """The Hugging Face JSON object: the one this was read from with the changed fields, or a new one.

        Raises:
            ConfigError: a change that the source's layout cannot hold (dense to sparse, or a vision tower in
                a flat file).
        """
        if self.source is None:
            return _write_new(self)
        data = copy.deepcopy(dict(self.source))
        baseline = _read(data)
        if (self.text.moe is None) != (baseline.text.moe is None) or (
            self.vision is not None and baseline.vision is None and not _is_nested(data)
        ):
            raise ConfigError(
                f"model_type: found {data['model_type']!r} in the file that this was read from, expected a "
                "layout that can hold the changed model; write it anew with "
                "dataclasses.replace(config, source=None)"
            )
        text_section = data["text_config"] if _is_nested(data) else data
        write_text(text_section, self.text, baseline.text)
        if _is_nested(data):
            for field in _contradictions(data, text_section, self.text):
                del data[field]
        if self.vision is None:
            data.pop("vision_config", None)
        elif self.vision != baseline.vision:
            data["vision_config"] = data.get("vision_config") or {}
            write_vision(data["vision_config"], self.vision, baseline.vision)
        for field in SPECIAL_TOKENS:
            if getattr(self, field) != getattr(baseline, field):
                data[field] = getattr(self, field)
        if self.tie_word_embeddings != baseline.tie_word_embeddings:
            data["tie_word_embeddings"] = self.tie_word_embeddings
            if "tie_word_embeddings" in text_section:
                text_section["tie_word_embeddings"] = self.tie_word_embeddings
        if self.dtype != baseline.dtype:
            _write_dtype(data, self.dtype)
        return data


def require_dense_text(config: ModelConfig | TextConfig) -> TextConfig:
    """The language model's configuration, for the model builder.

    Raises:
        ConfigError: it is a mixture of experts, whose layers are not built yet.
    """
    text = config.text if isinstance(config, ModelConfig) else config
    if text.moe is not None:
        raise ConfigError(
            f"num_experts: found {text.moe.num_experts}, expected a dense model; mixture-of-experts models "
            "cannot be built yet, only described (`qwen35 spec`)"
        )
    return text


def _read(data: JsonObject) -> ModelConfig:
    model_type = _read_model_type(data)
    sparse = "moe" in model_type
    for place in ("quantization_config", "compression_config"):
        for section in (data, data.get("text_config")):
            if isinstance(section, Mapping) and section.get(place):
                raise ConfigError(
                    f"{place}: found a quantized checkpoint, expected plain weights; quantized weights "
                    "cannot be loaded, take the unquantized model"
                )
    nested = _is_nested(data)
    text_section = _section(data, "text_config") if nested else data
    try:
        text = read_text(text_section, sparse=sparse)
    except ConfigError as error:
        raise (ConfigError(f"text_config.{error}") if nested else error) from None
    if nested:
        for field in _contradictions(data, text_section, text):
            refuse(
                field,
                data[field],
                f"what text_config says ({text_section.get(field)!r})",
                "the nested layout reads text_config; drop the field at the top or correct it",
            )
    vision = None
    if data.get("vision_config") is not None:
        section = _section(data, "vision_config")
        try:
            vision = read_vision(section)
        except ConfigError as error:
            raise ConfigError(f"vision_config.{error}") from None
    return ModelConfig(
        text=text,
        tie_word_embeddings=_read_tying(data, text_section, has_vision=vision is not None),
        vision=vision,
        dtype=_read_dtype(data, text_section),
        source=copy.deepcopy(data),
        **{field: data[field] for field in SPECIAL_TOKENS if data.get(field) is not None},
    )


def _section(data: JsonObject, name: str) -> JsonObject:
    section = data[name]
    if not isinstance(section, Mapping):
        refuse(name, section, "an object")
    return dict(section)


def _read_model_type(data: JsonObject) -> str:
    model_type = data.get("model_type")
    if isinstance(model_type, str) and model_type in OTHER_ARCHITECTURES:
        refuse("model_type", model_type, ", ".join(MODEL_TYPES), OTHER_ARCHITECTURES[model_type])
    if model_type not in MODEL_TYPES:
        refuse(
            "model_type", model_type, ", ".join(MODEL_TYPES), "this package builds the Qwen3.5 family only"
        )
    family = model_type.removesuffix("_text")
    if model_type in TEXT_TYPES:
        for name in ("text_config", "vision_config"):
            if data.get(name) is not None:
                refuse(
                    "model_type", model_type, f"{family!r} beside a {name}", f"correct it or drop the {name}"
                )
    # Early checkpoints repeat the outer name inside, and the vision tower is one for dense and sparse models.
    inner_types = {
        "text_config": (f"{family}_text", family),
        "vision_config": ("qwen3_5_vision", "qwen3_5_moe_vision", *COMPOSITE_TYPES),
    }
    for name, known in inner_types.items():
        section = data.get(name)
        inner = section.get("model_type") if isinstance(section, Mapping) else None
        if inner is not None and inner not in known:
            refuse(f"{name}.model_type", inner, f"{known[0]!r} under model_type {model_type!r}")
    return model_type


def _is_nested(data: Mapping[str, Any]) -> bool:
    return data.get("text_config") is not None


def _contradictions(data: JsonObject, section: JsonObject, text: TextConfig) -> list[str]:
    """Text fields at the top of a nested file that say something else than its `text_config`.

    They are not read, so they must not lead a reader astray: another tool might take them.
    """
    sparse = text.moe is not None
    contradicting = []
    for field in sorted((TEXT_SECTION_FIELDS & data.keys()) - FREE_AT_THE_TOP):
        if data[field] is None or data[field] == section.get(field):
            continue
        try:
            same = read_text({**section, field: data[field]}, sparse=sparse) == text
        except ConfigError:
            same = False
        if not same:
            contradicting.append(field)
    return contradicting


def _read_tying(data: JsonObject, text_section: JsonObject, *, has_vision: bool) -> bool:
    flag = data.get("tie_word_embeddings")
    if flag is None and not has_vision:
        flag = text_section.get("tie_word_embeddings")
    return False if flag is None else flag


def _read_dtype(data: JsonObject, text_section: JsonObject) -> Any:
    for section in (data, text_section):
        spellings = {name: section[name] for name in DTYPE_SPELLINGS if section.get(name) is not None}
        if spellings:
            return same_value("dtype", spellings)
    return None


def _write_dtype(data: JsonObject, dtype: str | None) -> None:
    written = False
    for section in (data, data.get("text_config"), data.get("vision_config")):
        for name in DTYPE_SPELLINGS:
            if isinstance(section, dict) and name in section:
                section[name] = dtype
                written = True
    if not written:
        data["dtype"] = dtype


def _write_new(config: ModelConfig) -> JsonObject:
    family = "Qwen3_5" if config.text.moe is None else "Qwen3_5Moe"
    text: JsonObject = {}
    write_text(text, config.text, None)
    beside: JsonObject = {"tie_word_embeddings": config.tie_word_embeddings}
    if config.dtype is not None:
        beside["dtype"] = config.dtype
    tokens = {field: getattr(config, field) for field in SPECIAL_TOKENS}
    if config.vision is None:
        # The placeholder tokens mean nothing to a text model, but a changed one is still part of this object.
        changed = {field: token for field, token in tokens.items() if token != SPECIAL_TOKENS[field]}
        return {
            "architectures": [f"{family}ForCausalLM"],
            "model_type": config.model_type,
            **beside,
            **text,
            **changed,
        }
    vision: JsonObject = {"model_type": f"{config.model_type}_vision"}
    write_vision(vision, config.vision, None)
    return {
        "architectures": [f"{family}ForConditionalGeneration"],
        "model_type": config.model_type,
        **beside,
        **tokens,
        "text_config": {"model_type": f"{config.model_type}_text", **beside, **text},
        "vision_config": vision,
    }
