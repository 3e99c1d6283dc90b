"""Optimizers: which of Optax's, on which parameters, at which rate.

What decays and what Muon takes is read off the logical axes of a parameter. A matrix has the residual width (`embed`)
on one side and heads, channels or the vocabulary on the other; those of LoRA have the rank on one. Norms, biases,
convolutions, `A_log` and `dt_bias` have neither: they never decay, as pulling a decay rate or a norm's scale towards 0
changes what a layer remembers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import optax
from optax.contrib import MuonDimensionNumbers, muon

from qwen35_jax.errors import ConfigError
from qwen35_jax.sharding.rules import LogicalAxes

Axes = Any
"""A tree of `LogicalAxes` with the structure of the parameters, from `qwen35_jax.sharding.parameter_axes`."""

_SINGLE_AXES = frozenset({"embed", "mtp_embed", "rank"})
"""Axes that are by themselves one side of a matrix."""

_STACKED = "repeats"


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """An optimizer and its schedule.

    Attributes:
        name: `adamw`; `muon`, for the matrices between the residual stream and the layers, with AdamW for the rest;
            or `adafactor`, which keeps one number for each row and column of a matrix.
        learning_rate: the highest. For `muon`, that of the matrices.
        adam_learning_rate: of what `muon` leaves to AdamW; None for the same.
        schedule: what follows the warm-up: the highest rate to the end, or a fall to `final_share` of it.
        warmup_steps: over which the rate rises from 0, linearly.
        decay_steps: the last ones of the run, in which the rate falls after it has stayed the highest; None for a fall
            that begins where the warm-up ends.
        final_share: of the highest rate, at the last step.
        weight_decay: times the rate, of matrices only; under `muon` only of those that it takes.
        beta1, beta2: decay of AdamW's moments.
        momentum: decay of Muon's.
        epsilon: beside the root of AdamW's second moment.
        clip_norm: gradients whose norm is larger, all together, are scaled down to it.
    """

    name: Literal["adamw", "muon", "adafactor"] = "adamw"
    learning_rate: float = 2e-5
    adam_learning_rate: float | None = None
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: int = 0
    decay_steps: int | None = None
    final_share: float = 0.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.95
    epsilon: float = 1e-8
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        self._check_choice("name", ("adamw", "muon", "adafactor"))
        self._check_choice("schedule", ("constant", "linear", "cosine"))
        for name in ("learning_rate", "epsilon", "clip_norm"):
            self._check(name, getattr(self, name) > 0, "a number above 0")
        for name in ("weight_decay", "warmup_steps"):
            self._check(name, getattr(self, name) >= 0, "a number of at least 0")
        for name in ("beta1", "beta2", "momentum"):
            self._check(name, 0 <= getattr(self, name) < 1, "a number from 0 to below 1")
        self._check("final_share", 0 <= self.final_share <= 1, "a number from 0 to 1")
        if self.decay_steps is not None:
            self._check("decay_steps", self.decay_steps >= 1, "at least 1")
            self._check("decay_steps", self.schedule != "constant", "none: a constant rate does not fall")
        if self.adam_learning_rate is not None:
            self._check("adam_learning_rate", self.adam_learning_rate > 0, "a number above 0")
            self._check("adam_learning_rate", self.name == "muon", "none: only muon has a second rate")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        self._check(name, getattr(self, name) in choices, "one of " + ", ".join(choices))

    def _check(self, name: str, holds: bool, expected: str) -> None:
        value = getattr(self, name)
        if not holds or (isinstance(value, float) and not math.isfinite(value)):
            raise ConfigError(f"optimizer.{name} is {value!r}, expected {expected}")


def make_optimizer(settings: OptimizerSettings, axes: Axes, *, steps: int) -> optax.GradientTransformation:
    """The optimizer of a run.

    Args:
        settings: see there.
        axes: of the parameters that are trained.
        steps: of the whole run, which the schedule spans.

    Raises:
        ConfigError: as for `schedule`.
    """
    decays = jax.tree.map(is_matrix, axes, is_leaf=_is_axes)
    rate = schedule(settings, steps=steps)
    if settings.name == "adafactor":
        chosen = optax.chain(
            optax.scale_by_factored_rms(),
            optax.add_decayed_weights(settings.weight_decay, mask=decays),
            optax.scale_by_learning_rate(rate),
        )
    elif settings.name == "muon":
        highest = settings.adam_learning_rate or settings.learning_rate
        chosen = muon(
            rate,
            beta=settings.momentum,
            weight_decay=settings.weight_decay,
            adam_b1=settings.beta1,
            adam_b2=settings.beta2,
            adam_learning_rate=schedule(dataclasses.replace(settings, learning_rate=highest), steps=steps),
            muon_weight_dimension_numbers=jax.tree.map(_muon_dimensions, axes, is_leaf=_is_axes),
            consistent_rms=None,
        )
    else:
        chosen = optax.adamw(
            rate,
            b1=settings.beta1,
            b2=settings.beta2,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            mask=decays,
        )
    return optax.chain(optax.clip_by_global_norm(settings.clip_norm), chosen)


def schedule(settings: OptimizerSettings, *, steps: int) -> optax.Schedule:
    """The learning rate at each step, counted from 0.

    Raises:
        ConfigError: the warm-up takes longer than the run, or overlaps with the decay.
    """
    warmup, highest = settings.warmup_steps, settings.learning_rate
    if warmup > steps:
        raise ConfigError(
            f"optimizer.warmup_steps is {warmup}, expected no more than the {steps} steps of the run"
        )
    if settings.decay_steps is not None and settings.decay_steps > steps - warmup:
        raise ConfigError(
            f"optimizer.decay_steps is {settings.decay_steps}, expected no more than the {steps - warmup} steps that "
            "follow the warm-up"
        )
    falling = settings.decay_steps or max(1, steps - warmup)
    after = {
        "constant": optax.constant_schedule(highest),
        "linear": optax.linear_schedule(highest, highest * settings.final_share, falling),
        "cosine": optax.cosine_decay_schedule(highest, falling, alpha=settings.final_share),
    }[settings.schedule]
    # The first step already moves: a rise from 0 would waste it.
    rise = optax.linear_schedule(highest / max(1, warmup), highest, max(1, warmup - 1))
    return optax.join_schedules([rise, optax.constant_schedule(highest), after], [warmup, steps - falling])


def is_matrix(axes: LogicalAxes) -> bool:
    """Whether a parameter maps from one space to another: all but norms, biases, convolutions and gates."""
    names = [name for name in axes.names if name != _STACKED]
    return len(names) > 1 and not _SINGLE_AXES.isdisjoint(names)


def _muon_dimensions(axes: LogicalAxes) -> MuonDimensionNumbers | None:
    """Which axes of a matrix are summed over and which come out; None for what AdamW takes, tables of tokens as well.

    Weights are kept as [out, in], and one of the two is the residual width or LoRA's rank. Axes are counted from the
    end, so that a leading axis of repeats is one of many matrices.
    """
    if not is_matrix(axes) or "vocab" in axes.names:
        return None
    names = [name for name in axes.names if name != _STACKED]
    count = len(names)
    if names[0] in _SINGLE_AXES:
        return MuonDimensionNumbers(tuple(range(1 - count, 0)), (-count,))
    return MuonDimensionNumbers((-1,), tuple(range(-count, -1)))


def _is_axes(node: Any) -> bool:
    return isinstance(node, LogicalAxes)
