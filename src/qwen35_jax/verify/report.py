"""What a comparison found, and the bounds that it is held against. Needs no PyTorch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np


@dataclasses.dataclass
class Errors:
    """Worst relative errors over everything that was compared.

    Attributes:
        nodes: by node name, each fed with the reference's inputs, worst over layers and calls.
        layers: by kind, a whole layer fed with the reference's input and cache.
        end_to_end: of our model run by itself: `forward`, `prefill`, `chunked_prefill`, `decode` (logits) and
            `cache` (every layer's memory at the end).
    """

    nodes: dict[str, float] = dataclasses.field(default_factory=dict)
    layers: dict[str, float] = dataclasses.field(default_factory=dict)
    end_to_end: dict[str, float] = dataclasses.field(default_factory=dict)

    def merge(self, other: Errors) -> None:
        """Take over what is worse in `other`."""
        for mine, theirs in (
            (self.nodes, other.nodes),
            (self.layers, other.layers),
            (self.end_to_end, other.end_to_end),
        ):
            for name, value in theirs.items():
                note_worst(mine, name, value)

    @property
    def worst_node(self) -> float:
        return float(np.max(list(self.nodes.values())))  # NaN wins, unlike in max()

    @property
    def worst_end_to_end(self) -> float:
        return float(np.max(list(self.end_to_end.values())))


def note_worst(worst: dict[str, float], name: str, value: Any) -> None:
    """Keep the larger of what `worst` holds under `name` and `value`; NaN stays."""
    worst[name] = float(np.maximum(worst.get(name, 0.0), float(value)))


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Largest relative errors that pass.

    Attributes:
        node: of a node fed with the reference's inputs.
        end_to_end: of the whole model run by itself.
    """

    node: float
    end_to_end: float


# The reference always runs in float64, so in a narrower dtype the error is that dtype's own rounding. Float64: the
# level that a public conformance project reports for the official code against its formal specification.
BOUNDS: dict[str, Bounds] = {
    "float64": Bounds(node=4.1e-14, end_to_end=1e-12),
    "float32": Bounds(node=1e-5, end_to_end=1e-3),
    "bfloat16": Bounds(node=5e-2, end_to_end=5e-1),
}


@dataclasses.dataclass(frozen=True)
class Report:
    """What was found, and whether it is within the bounds."""

    errors: Errors
    bounds: Bounds
    dtype: str
    lengths: tuple[int, ...]
    draws: int

    @property
    def passed(self) -> bool:
        # A layer is a stretch of the whole model, so it is held against that bound. NaN fails every comparison.
        stretches = (*self.errors.layers.values(), self.errors.worst_end_to_end)
        return self.errors.worst_node <= self.bounds.node and all(
            error <= self.bounds.end_to_end for error in stretches
        )

    def to_json(self) -> dict[str, Any]:
        """The object that `qwen35 verify --json` prints. JSON has no NaN, so such an error is null."""

        def numbers(errors: dict[str, float]) -> dict[str, float | None]:
            return {name: _finite(error) for name, error in errors.items()}

        return {
            "passed": self.passed,
            "dtype": self.dtype,
            "max_relative_error": _finite(self.errors.worst_node),
            "bound": self.bounds.node,
            "end_to_end_relative_error": _finite(self.errors.worst_end_to_end),
            "end_to_end_bound": self.bounds.end_to_end,
            "nodes": numbers(self.errors.nodes),
            "layers": numbers(self.errors.layers),
            "end_to_end": numbers(self.errors.end_to_end),
            "lengths": list(self.lengths),
            "draws": self.draws,
        }


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None
