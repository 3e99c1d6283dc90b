"""The one table that says which Hugging Face tensor holds which parameters, read in both directions.

A row names a tensor of the file and the parameters cut from its rows. Each part carries an einops pattern
whose left side has the tensor's axes and whose right side has the parameter's; swapping the sides gives the
way back. Nothing is transposed but the convolution kernel and nothing is shifted or scaled: norm weights are
stored as in the file, and the `1 + w` belongs to the op.

Two layouts of rows occur. `in_proj_qkv` stacks its parts one after the other (q rows, k rows, v rows).
`q_proj` repeats its parts for every head (query rows of head 0, gate rows of head 0, query rows of head 1,
...): such a row of the table is `grouped`, and the first axis of its patterns counts the groups.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

from qwen35_jax.config import LayerKind, ModelConfig, TextConfig


@dataclasses.dataclass(frozen=True)
class Part:
    """A parameter and the einops pattern from the tensor's rows that hold it."""

    parameter: str
    pattern: str


@dataclasses.dataclass(frozen=True)
class Rule:
    """A tensor of the file and the parameters that its rows hold, in the order of the rows."""

    tensor: str
    parts: tuple[Part, ...]
    grouped: bool = False


def _rule(tensor: str, *parts: tuple[str, str], grouped: bool = False) -> Rule:
    return Rule(tensor, tuple(Part(*part) for part in parts), grouped)


MODEL = (
    _rule("{text}embed_tokens.weight", ("embed_tokens.weight", "vocab embed -> vocab embed")),
    _rule("{text}norm.weight", ("final_norm.weight", "embed -> embed")),
)

LM_HEAD = (_rule("{head}lm_head.weight", ("lm_head.weight", "vocab embed -> vocab embed")),)

TIED_LM_HEAD = (_rule("{head}lm_head.weight", ("embed_tokens.weight", "vocab embed -> vocab embed")),)
"""A tied checkpoint may still hold the head; it must then equal the embedding."""

LAYER_NORMS = (
    _rule("input_layernorm.weight", ("input_norm.weight", "embed -> embed")),
    _rule("post_attention_layernorm.weight", ("post_attn_norm.weight", "embed -> embed")),
)

MLP = (
    _rule("mlp.gate_proj.weight", ("mlp.gate_weight", "mlp embed -> mlp embed")),
    _rule("mlp.up_proj.weight", ("mlp.up_weight", "mlp embed -> mlp embed")),
    _rule("mlp.down_proj.weight", ("mlp.down_weight", "embed mlp -> embed mlp")),
)

GATED_DELTA_NET = (
    _rule(
        "linear_attn.in_proj_qkv.weight",
        ("mixer.q_weight", "(key_heads key_dim) embed -> key_heads key_dim embed"),
        ("mixer.k_weight", "(key_heads key_dim) embed -> key_heads key_dim embed"),
        ("mixer.v_weight", "(value_heads value_dim) embed -> value_heads value_dim embed"),
    ),
    _rule(
        "linear_attn.in_proj_z.weight",
        ("mixer.z_weight", "(value_heads value_dim) embed -> value_heads value_dim embed"),
    ),
    _rule("linear_attn.in_proj_b.weight", ("mixer.b_weight", "value_heads embed -> value_heads embed")),
    _rule("linear_attn.in_proj_a.weight", ("mixer.a_weight", "value_heads embed -> value_heads embed")),
    _rule(
        "linear_attn.conv1d.weight",
        ("mixer.conv_q", "(key_heads key_dim) 1 kernel -> kernel key_heads key_dim"),
        ("mixer.conv_k", "(key_heads key_dim) 1 kernel -> kernel key_heads key_dim"),
        ("mixer.conv_v", "(value_heads value_dim) 1 kernel -> kernel value_heads value_dim"),
    ),
    _rule("linear_attn.A_log", ("mixer.A_log", "value_heads -> value_heads")),
    _rule("linear_attn.dt_bias", ("mixer.dt_bias", "value_heads -> value_heads")),
    _rule("linear_attn.norm.weight", ("mixer.norm_weight", "value_dim -> value_dim")),
    _rule(
        "linear_attn.out_proj.weight",
        ("mixer.out_weight", "embed (value_heads value_dim) -> embed value_heads value_dim"),
    ),
)

GATED_ATTENTION = (
    _rule(
        "self_attn.q_proj.weight",
        ("mixer.q_weight", "heads head_dim embed -> heads head_dim embed"),
        ("mixer.gate_weight", "heads head_dim embed -> heads head_dim embed"),
        grouped=True,
    ),
    _rule(
        "self_attn.k_proj.weight", ("mixer.k_weight", "(kv_heads head_dim) embed -> kv_heads head_dim embed")
    ),
    _rule(
        "self_attn.v_proj.weight", ("mixer.v_weight", "(kv_heads head_dim) embed -> kv_heads head_dim embed")
    ),
    _rule("self_attn.o_proj.weight", ("mixer.o_weight", "embed (heads head_dim) -> embed heads head_dim")),
    _rule("self_attn.q_norm.weight", ("mixer.q_norm_weight", "head_dim -> head_dim")),
    _rule("self_attn.k_norm.weight", ("mixer.k_norm_weight", "head_dim -> head_dim")),
)

GATED_ATTENTION_BIAS = (
    _rule(
        "self_attn.q_proj.bias",
        ("mixer.q_bias", "heads head_dim -> heads head_dim"),
        ("mixer.gate_bias", "heads head_dim -> heads head_dim"),
        grouped=True,
    ),
    _rule("self_attn.k_proj.bias", ("mixer.k_bias", "(kv_heads head_dim) -> kv_heads head_dim")),
    _rule("self_attn.v_proj.bias", ("mixer.v_bias", "(kv_heads head_dim) -> kv_heads head_dim")),
    _rule("self_attn.o_proj.bias", ("mixer.o_bias", "embed -> embed")),
)

MTP = (
    _rule("mtp.fc.weight", ("mtp.fc_weight", "embed (part input) -> embed part input")),
    _rule("mtp.pre_fc_norm_embedding.weight", ("mtp.embedding_norm.weight", "embed -> embed")),
    _rule("mtp.pre_fc_norm_hidden.weight", ("mtp.hidden_norm.weight", "embed -> embed")),
    _rule("mtp.norm.weight", ("mtp.norm.weight", "embed -> embed")),
)


def axis_sizes(config: TextConfig) -> dict[str, int]:
    """Size of every axis named in the table's patterns; a mixture of experts has no `mlp`."""
    sizes = {
        "vocab": config.vocab_size,
        "embed": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "key_heads": config.linear_num_key_heads,
        "key_dim": config.linear_key_head_dim,
        "value_heads": config.linear_num_value_heads,
        "value_dim": config.linear_value_head_dim,
        "kernel": config.linear_conv_kernel_dim,
        "part": 2,
        "input": config.hidden_size,
    }
    return sizes if config.intermediate_size is None else {**sizes, "mlp": config.intermediate_size}


def pattern_axes(side: str) -> list[list[str]]:
    """The axes of one side of a pattern, each as its list of factors: "(a b) c 1" -> [[a, b], [c], []]."""
    tokens = re.findall(r"\([^)]*\)|\S+", side)
    return [[factor for factor in token.strip("()").split() if factor != "1"] for token in tokens]


def pattern_sides(pattern: str) -> tuple[str, str]:
    """The tensor's axes and the parameter's."""
    source, target = (side.strip() for side in pattern.split("->"))
    return source, target


def extents(side: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The size of every axis of one side of a pattern."""
    return tuple(math.prod(sizes[factor] for factor in axis) for axis in pattern_axes(side))


def tensor_shape(rule: Rule, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of the whole tensor, the rows of all its parts together."""
    parts = [extents(pattern_sides(part.pattern)[0], sizes) for part in rule.parts]
    if rule.grouped:  # the first axis counts the groups
        groups = parts[0][0]
        return (groups * sum(part[1] for part in parts), *parts[0][2:])
    return (sum(part[0] for part in parts), *parts[0][1:])


def mixer_rules(config: TextConfig, kind: LayerKind) -> tuple[Rule, ...]:
    """The rows for the token mixer of a layer."""
    if kind == "linear_attention":
        return GATED_DELTA_NET
    return GATED_ATTENTION + (GATED_ATTENTION_BIAS if config.attention_bias else ())


@dataclasses.dataclass(frozen=True)
class Spelling:
    """How a checkpoint spells the prefix of the text model's tensors and of the head."""

    text: str
    head: str


SPELLINGS = (
    Spelling("model.language_model.", ""),  # Qwen3_5ForConditionalGeneration, as published
    Spelling("language_model.model.", "language_model."),  # the older vision-language order
    Spelling("model.", ""),  # Qwen3_5ForCausalLM
)

LAYER_PREFIX = "layers.{layer}."
MTP_PREFIX = "mtp."
MTP_LAYER_PREFIX = "mtp.layers.{layer}."
VISION_PREFIX = "model.visual."


def default_spelling(config: ModelConfig) -> Spelling:
    """How the Hugging Face class for this configuration spells its tensors."""
    by_prefix = {each.text: each for each in SPELLINGS}
    return by_prefix["model." if config.model_type.endswith("_text") else "model.language_model."]
