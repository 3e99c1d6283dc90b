"""The whole specification of a model: its graph, and its parameters counted by part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

from qwen35_jax.config import ModelConfig
from qwen35_jax.spec.graph import graph_nodes
from qwen35_jax.spec.node import Node, Part

PARTS: tuple[Part, ...] = get_args(Part)
BESIDE_THE_TEXT_MODEL: tuple[Part, ...] = ("mtp", "vision")


@dataclasses.dataclass(frozen=True)
class Specification:
    """A model in closed form.

    Attributes:
        config: what it was made from.
        nodes: the graph.
        by_part: parameters by part of the model.
    """

    config: ModelConfig
    nodes: tuple[Node, ...]
    by_part: Mapping[Part, int]

    @property
    def text_parameters(self) -> int:
        """Of the language model alone, without multi-token prediction and vision; a tied head counts once."""
        return sum(count for part, count in self.by_part.items() if part not in BESIDE_THE_TEXT_MODEL)

    @property
    def active_parameters(self) -> int:
        """Those of the language model that one token meets: of the experts only the chosen ones."""
        moe = self.config.text.moe
        if moe is None:
            return self.text_parameters
        experts = next(node.parameters for node in self.nodes if node.name == "moe.experts")
        return self.text_parameters - experts + experts // moe.num_experts * moe.num_experts_per_tok

    def to_json(self) -> dict[str, Any]:
        """The object that `qwen35 spec --json` prints."""
        text = self.config.text
        return {
            "model_type": self.config.model_type,
            "parameters": {
                "text": self.text_parameters,
                "active": self.active_parameters,
                "total": sum(self.by_part.values()),
                "by_part": dict(self.by_part),
            },
            "layers": {
                "linear_attention": text.layer_types.count("linear_attention"),
                "full_attention": text.layer_types.count("full_attention"),
            },
            "max_context": text.max_context,
            "nodes": [
                {
                    "name": node.name,
                    "op": node.op,
                    "layers": list(node.layers),
                    "maps": node.maps,
                    "formula": node.formula,
                    "constants": dict(node.constants),
                    "tensors": {name: list(shape) for name, shape in node.tensors.items()},
                    "parameters": node.parameters,
                }
                for node in self.nodes
            ],
        }


def specify(config: ModelConfig) -> Specification:
    """The specification of a configuration: no weights and no arrays needed."""
    nodes = graph_nodes(config)
    by_part: dict[Part, int] = {
        part: sum(node.parameters for node in nodes if node.part == part) for part in PARTS
    }
    return Specification(config, nodes, by_part)
