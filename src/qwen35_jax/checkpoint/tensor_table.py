"""The table of tensor names bound to a model: which rows of which tensor hold which parameters.

The table itself is `qwen35_jax.spec.tensor_rules`. Here its rows get the sizes of a model and the places of the
parameters in the nested dictionary, stacked over the repeats of the layer pattern.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import einops
import numpy as np

from qwen35_jax.checkpoint.parameter_tree import ParameterPath
from qwen35_jax.config import ModelConfig, require_dense_text
from qwen35_jax.layer_groups import layer_groups, layer_locations
from qwen35_jax.spec.tensor_rules import (
    LAYER_NORMS,
    LAYER_PREFIX,
    LM_HEAD,
    MLP,
    MODEL,
    MTP,
    MTP_LAYER_PREFIX,
    MTP_PREFIX,
    SPELLINGS,
    TIED_LM_HEAD,
    VISION_PREFIX,
    Rule,
    Spelling,
    axis_sizes,
    extents,
    mixer_rules,
    pattern_axes,
    pattern_sides,
    tensor_shape,
)

NEVER_NARROWED = frozenset({"A_log", "dt_bias", "norm_weight"})
"""Last keys of the parameters that keep the file's dtype under a narrower parameter dtype: `A_log` and
`dt_bias` make the decay, whose error compounds over the sequence, and published checkpoints store them (and
this norm) in float32."""


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
    for part in rule.parts:
        source, target = pattern_sides(part.pattern)
        shape = extents(source, sizes)
        rows = shape[1] if rule.grouped else shape[0]
        used = {factor for axis in pattern_axes(source) for factor in axis}
        parts.append(
            BoundPart(
                path=prefix + tuple(part.parameter.split(".")),
                start=start,
                stop=start + rows,
                source=source,
                target=target,
                shape=extents(target, sizes),
                sizes={factor: sizes[factor] for factor in sorted(used)},
                groups=shape[0] if rule.grouped else 1,
            )
        )
        start += rows
    return BoundTensor(name, tensor_shape(rule, sizes), rule.grouped, tuple(parts), **stack)


KEPT_PREFIXES = (MTP_PREFIX, VISION_PREFIX, "visual.")
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

    Raises:
        ConfigError: the model is a mixture of experts, which cannot be built.
    """
    text = require_dense_text(config)
    sizes = axis_sizes(text)
    names = {"text": spelling.text, "head": spelling.head}
    for rule in MODEL:
        yield _bind(rule, rule.tensor.format(**names), (), sizes)
    if not config.tie_word_embeddings or lm_head:
        for rule in TIED_LM_HEAD if config.tie_word_embeddings else LM_HEAD:
            yield _bind(rule, rule.tensor.format(**names), (), sizes)
    groups = layer_groups(text)
    for layer, location in enumerate(layer_locations(text)):
        prefix = ("decoder", "groups", location.group, "layers", location.position)
        stack = {"repeat": location.repeat, "repeats": groups[location.group].repeats}
        before = spelling.text + LAYER_PREFIX.format(layer=layer)
        for rule in LAYER_NORMS + MLP + mixer_rules(text, text.layer_types[layer]):
            yield _bind(rule, before + rule.tensor, prefix, sizes, **stack)
    if mtp:
        for rule in MTP:
            yield _bind(rule, rule.tensor, (), sizes)
        before = MTP_LAYER_PREFIX.format(layer=0)
        for rule in LAYER_NORMS + MLP + mixer_rules(text, "full_attention"):
            yield _bind(rule, before + rule.tensor, ("mtp", "layer"), sizes)


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
