"""One node of the model's graph, and how its tensors are picked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from qwen35_jax.spec.tensors import Shape, Shapes

Part = Literal["embedding", "norms", "gated_delta_net", "attention", "mlp", "lm_head", "mtp", "vision"]


@dataclasses.dataclass(frozen=True)
class Node:
    """One node of the graph.

    Attributes:
        name: its name in scopes and reports, such as "gdn.in_proj".
        part: which part of the model its parameters are counted with.
        op: the kind of operation.
        layers: indices of the layers that have it; empty where it stands outside the layers.
        maps: what comes in and goes out for one token, such as "5120 -> 16480".
        formula: what it computes, in the symbols that `spec/graph.py` explains.
        constants: numbers in the formula that are no parameters.
        tensors: Hugging Face names and shapes; "{layer}" stands for each index of `layers`.
    """

    name: str
    part: Part
    op: str
    layers: tuple[int, ...]
    maps: str
    formula: str
    constants: Mapping[str, Any]
    tensors: Mapping[str, Shape]

    @property
    def parameters(self) -> int:
        """Numbers in its tensors, over all its layers."""
        return sum(math.prod(shape) for shape in self.hf_tensors().values())

    def hf_tensors(self) -> Shapes:
        """Its tensors with the layer indices filled in."""
        return {
            name.replace("{layer}", str(layer)): shape
            for layer in self.layers or (0,)
            for name, shape in self.tensors.items()
        }


def choose(shapes: Shapes, prefix: str, *beginnings: str) -> Shapes:
    """Those of a module's tensors whose names begin so, under their full names."""
    return {prefix + name: shape for name, shape in shapes.items() if name.startswith(beginnings)}
