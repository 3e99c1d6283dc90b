"""LoRA: training of a small low-rank change to the linear maps of the layers, while the model itself stays.

The adapter is a tree of its own. For each linear map, by its name in Hugging Face's classes, it holds one `a` and, of
each parameter that is cut from that map here, one `b`:

    {"decoder": {"groups": {0: {"layers": {0: {"mixer": {"in_proj_qkv": {
        "a": [repeats, rank, embed],
        "b": {"q_weight": [repeats, key_heads, key_dim, rank], "k_weight": ..., "v_weight": ...}}}}}}}}}

So a rank means what it means in PEFT, and its files hold the same numbers.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Key

from qwen35_jax.checkpoint.parameter_tree import ParameterPath, leaf, set_leaf
from qwen35_jax.checkpoint.tensor_table import BoundTensor, bound_tensors
from qwen35_jax.config import ModelConfig
from qwen35_jax.errors import ConfigError
from qwen35_jax.model import Parameters
from qwen35_jax.nn.parameter import key_stream
from qwen35_jax.ops.low_rank import LowRankWeight
from qwen35_jax.sharding.rules import LogicalAxes
from qwen35_jax.spec.tensor_rules import Spelling, default_spelling, pattern_axes

LINEAR_MAPS = (
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_b",
    "in_proj_a",
    "out_proj",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
"""The linear maps of the decoder's layers, all of them. The draft head has such layers too, but Hugging Face's classes
do not build it, so that no PEFT file could hold its part: it stays as it is."""

ALL_LINEAR = "all-linear"

Adapter = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class LoRA:
    """What is adapted, and how.

    Called with an adapter, the model's parameters and a key or None, it is `with_adapter`: so `train_step` makes of
    both the parameters of a micro-batch.

    Attributes:
        rank: of each change.
        alpha: the change is scaled by alpha / rank.
        dropout: share of the inputs that a change does not see in training.
        targets: names of linear maps, or `all-linear` for all that the model has.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] | Literal["all-linear"] = ALL_LINEAR

    def __post_init__(self) -> None:
        self._check("rank", isinstance(self.rank, int) and self.rank >= 1, "a whole number of at least 1")
        self._check("alpha", 0 < self.alpha < float("inf"), "a number above 0")
        self._check("dropout", 0 <= self.dropout < 1, "a number from 0 to below 1")
        if self.targets == ALL_LINEAR:
            return
        known = f"'{ALL_LINEAR}' or a list of some of {', '.join(LINEAR_MAPS)}"
        self._check("targets", not isinstance(self.targets, str) and len(self.targets) > 0, known)
        object.__setattr__(self, "targets", tuple(self.targets))
        self._check("targets", set(self.targets) <= set(LINEAR_MAPS), known)

    def _check(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ConfigError(f"lora.{name} is {getattr(self, name)!r}, expected {expected}")

    @property
    def scale(self) -> float:
        """Factor of the change."""
        return self.alpha / self.rank

    def __call__(self, trained: Adapter, frozen: Parameters | None, key: Key[Array, ""] | None) -> Parameters:
        if frozen is None:
            raise ConfigError(
                "lora: an adapter is trained beside the parameters of a model, and there are none"
            )
        return with_adapter(frozen, trained, self, key)


def adapted_tensors(config: ModelConfig, settings: LoRA, spelling: Spelling) -> list[BoundTensor]:
    """The tensors of a checkpoint that an adapter changes.

    Raises:
        ConfigError: a target that the model has not. It would be trained nowhere, and nobody would notice.
    """
    layers = bound_tensors(config, spelling, mtp=False, lm_head=False)
    present = [tensor for tensor in layers if map_name(tensor) in LINEAR_MAPS]
    if settings.targets == ALL_LINEAR:
        return present
    names = {map_name(tensor) for tensor in present}
    for target in settings.targets:
        if target not in names:
            raise ConfigError(
                f"lora.targets: '{target}' matches nothing in this model, which has {', '.join(sorted(names))}"
            )
    return [tensor for tensor in present if map_name(tensor) in settings.targets]


def map_name(tensor: BoundTensor) -> str:
    """The last name before `.weight`; empty for a tensor that is no weight."""
    before, _, kind = tensor.name.rpartition(".")
    return before.rpartition(".")[2] if kind == "weight" else ""


def change_shapes(tensor: BoundTensor, rank: int) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]]]:
    """Shapes of the change to a linear map: of its `a`, and of the `b` of each of its parameters."""
    assert tensor.repeats is not None, "layers are stacked"
    count = len(pattern_axes(tensor.parts[0].source)[-1])
    inputs = tensor.parts[0].shape[-count:]
    outputs = {part.path[-1]: part.shape[:-count] for part in tensor.parts}
    return (
        (tensor.repeats, rank, *inputs),
        {str(name): (tensor.repeats, *shape, rank) for name, shape in outputs.items()},
    )


def map_path(tensor: BoundTensor) -> ParameterPath:
    """Where the change to a linear map lies in an adapter."""
    return (*tensor.parts[0].path[:-1], map_name(tensor))


def init_adapter(
    config: ModelConfig, settings: LoRA, *, key: Key[Array, ""], dtype: DTypeLike = jnp.float32
) -> Adapter:
    """An adapter that changes nothing yet: `b` is 0, and `a` uniform in ±1 / √inputs, as PEFT draws it.

    Args:
        config: of the model.
        settings: what is adapted.
        key: of the random values.
        dtype: in which the adapter is kept and updated.

    Raises:
        ConfigError: a target that the model has not.
    """
    keys, adapter = key_stream(key), {}
    for tensor in adapted_tensors(config, settings, default_spelling(config)):
        if tensor.repeat != 0:  # the others lie in the same arrays
            continue
        a_shape, b_shapes = change_shapes(tensor, settings.rank)
        bound = tensor.shape[-1] ** -0.5
        change = {
            "a": jax.random.uniform(next(keys), a_shape, dtype, -bound, bound),
            "b": {name: jnp.zeros(shape, dtype) for name, shape in b_shapes.items()},
        }
        set_leaf(adapter, map_path(tensor), change)
    return adapter


def with_adapter(
    parameters: Parameters, adapter: Adapter, settings: LoRA, key: Key[Array, ""] | None
) -> Parameters:
    """The parameters with changes beside them: in place of each adapted weight a `LowRankWeight`, all others as before.

    Args:
        parameters: of the model; none is copied or cast.
        adapter: see `init_adapter`.
        settings: those that the adapter was made with.
        key: of the dropout, or None to leave it out. Parameters cut from one map drop the same inputs.
    """
    changed = jax.tree.map(lambda array: array, parameters)
    for index, (path, change) in enumerate(_changes(adapter)):
        keys = None
        if key is not None and settings.dropout:
            keys = jax.random.split(jax.random.fold_in(key, index), change["a"].shape[0])
        weights = leaf(changed, path[:-1])
        for name, b in change["b"].items():
            weights[name] = LowRankWeight(
                weights[name], change["a"], b, keys, settings.scale, settings.dropout
            )
    return changed


def merged(parameters: Parameters, adapter: Adapter, settings: LoRA) -> Parameters:
    """Plain parameters with the changes added, each in its own dtype. What is not adapted is the same array."""
    return jax.tree.map(
        lambda weight: weight.merged() if isinstance(weight, LowRankWeight) else weight,
        with_adapter(parameters, adapter, settings, None),
        is_leaf=lambda node: isinstance(node, LowRankWeight),
    )


def adapter_axes(adapter: Adapter, axes: Parameters) -> Adapter:
    """The logical axes of an adapter's arrays, as a tree of its structure: those of the weights, and `rank`.

    Args:
        adapter: its arrays, or their shapes.
        axes: of the model's parameters, from `qwen35_jax.sharding.parameter_axes`.
    """
    found: Adapter = {}
    for path, change in _changes(adapter):
        weights = leaf(axes, path[:-1])
        names = {part: weights[part].names for part in change["b"]}
        outputs = 2 - change["a"].ndim
        (inputs,) = {each[outputs:] for each in names.values()}
        one = {
            "a": LogicalAxes(("repeats", "rank", *inputs)),
            "b": {part: LogicalAxes((*each[:outputs], "rank")) for part, each in names.items()},
        }
        set_leaf(found, path, one)
    return found


def _changes(
    adapter: Mapping[Any, Any], path: ParameterPath = ()
) -> Iterator[tuple[ParameterPath, Mapping[str, Any]]]:
    """Every change with its place, in one order, whether the tree has been through `jax.jit` or not."""
    for key in sorted(adapter):
        if key in LINEAR_MAPS:
            yield (*path, key), adapter[key]
        else:
            yield from _changes(adapter[key], (*path, key))
