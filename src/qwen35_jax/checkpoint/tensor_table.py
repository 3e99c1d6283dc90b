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
from collections.abc import Iterable, Iterator, Mapping

import einops
import numpy as np

from qwen35_jax.checkpoint.parameter_tree import ParameterPath
from qwen35_jax.config import ModelConfig, TextConfig
from qwen35_jax.errors import CheckpointError
from qwen35_jax.layer_groups import layer_groups, layer_locations


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

LAYER = (
    _rule("input_layernorm.weight", ("input_norm.weight", "embed -> embed")),
    _rule("post_attention_layernorm.weight", ("post_attn_norm.weight", "embed -> embed")),
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

NEVER_NARROWED = frozenset({"A_log", "dt_bias", "norm_weight"})
"""Last keys of the parameters that keep the file's dtype under a narrower parameter dtype: `A_log` and
`dt_bias` make the decay, whose error compounds over the sequence, and published checkpoints store them (and
this norm) in float32."""


def axis_sizes(config: TextConfig) -> dict[str, int]:
    """Size of every axis letter used in the table's patterns."""
    if config.moe is not None or config.intermediate_size is None:
        raise CheckpointError(
            "config.json describes a mixture-of-experts model (num_experts); only dense models can be loaded"
        )
    return {
        "vocab": config.vocab_size,
        "embed": config.hidden_size,
        "mlp": config.intermediate_size,
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


def pattern_axes(side: str) -> list[list[str]]:
    """The axes of one side of a pattern, each as its list of factors: "(a b) c 1" -> [[a, b], [c], []]."""
    tokens = re.findall(r"\([^)]*\)|\S+", side)
    return [[factor for factor in token.strip("()").split() if factor != "1"] for token in tokens]


@dataclasses.dataclass(frozen=True)
class BoundPart:
    """A part with its sizes: rows `start` to `stop` (of each group) of the tensor hold the parameter."""

    path: ParameterPath
    start: int
    stop: int
    source: str
    """Left side of the pattern: the tensor's axes, after that of the groups where there are any."""
    target: str
    """Right side of the pattern: the axes of the parameter, without the repeats."""
    shape: tuple[int, ...]
    """Shape of the parameter, without the repeats."""
    sizes: Mapping[str, int]
    groups: int = 1

    @property
    def keeps_order(self) -> bool:
        """Whether the values lie in the same order in both, so that bytes can be copied as they are."""
        source, target = (
            [f for axis in pattern_axes(side) for f in axis] for side in (self.source, self.target)
        )
        return source == target

    def view(self, rows: np.ndarray) -> np.ndarray:
        """The part's rows of a tensor with the parameter's axes: a view, to read from and write to."""
        return einops.rearrange(rows, f"{self.source} -> {self.target}", **self.sizes)


@dataclasses.dataclass(frozen=True)
class BoundTensor:
    """A row of the table for one tensor of a given model.

    `repeat` is the index on the leading axis of its (stacked) parameters, `repeats` that axis' size; both are
    None for a parameter that is not stacked.
    """

    name: str
    shape: tuple[int, ...]
    grouped: bool
    parts: tuple[BoundPart, ...]
    repeat: int | None = None
    repeats: int | None = None

    def part_view(self, tensor: np.ndarray, part: BoundPart) -> np.ndarray:
        """A part of the whole tensor with the parameter's axes; loading reads it, an export writes it."""
        if self.grouped:
            rows_per_group = self.shape[0] // part.groups
            tensor = tensor.reshape(part.groups, rows_per_group, *self.shape[1:])
            return part.view(tensor[:, part.start : part.stop])
        return part.view(tensor[part.start : part.stop])


def _bind(
    rule: Rule, name: str, prefix: ParameterPath, sizes: Mapping[str, int], **stack: int | None
) -> BoundTensor:
    parts = []
    start = 0
    rest: list[int] = []
    groups = 1
    for part in rule.parts:
        source, target = (side.strip() for side in part.pattern.split("->"))
        extents = [math.prod(sizes[factor] for factor in axis) for axis in pattern_axes(source)]
        if rule.grouped:
            groups, *extents = extents
        rows, *rest = extents
        used = {factor for axis in pattern_axes(source) for factor in axis}
        parts.append(
            BoundPart(
                path=prefix + tuple(part.parameter.split(".")),
                start=start,
                stop=start + rows,
                source=source,
                target=target,
                shape=tuple(math.prod(sizes[factor] for factor in axis) for axis in pattern_axes(target)),
                sizes={factor: sizes[factor] for factor in sorted(used)},
                groups=groups,
            )
        )
        start += rows
    return BoundTensor(name, (groups * start, *rest), rule.grouped, tuple(parts), **stack)


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

KEPT_PREFIXES = ("mtp.", "model.visual.", "visual.")
"""Tensors that the text model does not use. They are carried along and exported untouched."""


def bound_tensors(
    config: ModelConfig, spelling: Spelling, *, mtp: bool, lm_head: bool
) -> Iterator[BoundTensor]:
    """Every tensor of a checkpoint that holds parameters of this model.

    Args:
        config: the model.
        spelling: the prefixes that the checkpoint uses.
        mtp: whether the multi-token-prediction layer is part of the model.
        lm_head: whether a tied checkpoint also stores its head (an untied one always does).
    """
    text = config.text
    sizes = axis_sizes(text)
    names = {"text": spelling.text, "head": spelling.head}
    for rule in MODEL:
        yield _bind(rule, rule.tensor.format(**names), (), sizes)
    if not config.tie_word_embeddings or lm_head:
        for rule in TIED_LM_HEAD if config.tie_word_embeddings else LM_HEAD:
            yield _bind(rule, rule.tensor.format(**names), (), sizes)
    attention = GATED_ATTENTION + (GATED_ATTENTION_BIAS if text.attention_bias else ())
    mixers = {"linear_attention": GATED_DELTA_NET, "full_attention": attention}
    groups = layer_groups(text)
    for layer, location in enumerate(layer_locations(text)):
        prefix = ("decoder", "groups", location.group, "layers", location.position)
        stack = {"repeat": location.repeat, "repeats": groups[location.group].repeats}
        for rule in LAYER + mixers[text.layer_types[layer]]:
            yield _bind(rule, f"{spelling.text}layers.{layer}.{rule.tensor}", prefix, sizes, **stack)
    if mtp:
        for rule in MTP:
            yield _bind(rule, rule.tensor, (), sizes)
        for rule in LAYER + attention:
            yield _bind(rule, f"mtp.layers.0.{rule.tensor}", ("mtp", "layer"), sizes)


def bound_shapes(bound: Iterable[BoundTensor]) -> dict[ParameterPath, tuple[int, ...]]:
    """Shape of every parameter that the tensors hold, by its path, the leading axis of repeats included."""
    shapes: dict[ParameterPath, tuple[int, ...]] = {}
    for tensor in bound:
        stack = () if tensor.repeats is None else (tensor.repeats,)
        for part in tensor.parts:
            shapes[part.path] = stack + part.shape
    return shapes


def parameter_shapes(config: ModelConfig, *, mtp: bool) -> dict[ParameterPath, tuple[int, ...]]:
    """Shape of every parameter of the model, by its path, the leading axis of repeats included."""
    return bound_shapes(bound_tensors(config, SPELLINGS[0], mtp=mtp, lm_head=False))
