"""The vision tower's configuration (`vision_config` of a Hugging Face `config.json`)."""

from __future__ import annotations

import dataclasses
from typing import Literal

from qwen35_jax.config.checks import (
    check_choice,
    check_integer,
    check_layer_count,
    check_multiple,
    check_number,
    refuse,
)


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The vision tower: patches to embeddings of the language model.

    `num_position_embeddings` is the number of entries of a square table of learned positions.
    `out_hidden_size` is the language model's `hidden_size`; the Hugging Face default fits no published model,
    so it has none here.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    hidden_act: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    in_channels: int = 3
    patch_size: int = 16
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    num_position_embeddings: int = 2304
    initializer_range: float = 0.02
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        for name in (
            "hidden_size", "intermediate_size", "num_heads", "out_hidden_size", "in_channels",
            "patch_size", "spatial_merge_size", "temporal_patch_size", "num_position_embeddings",
        ):  # fmt: skip
            check_integer(name, getattr(self, name))
        check_layer_count("depth", self.depth)
        check_multiple("hidden_size", self.hidden_size, "num_heads", self.num_heads)
        if self.head_dim % 4:
            refuse(
                "hidden_size",
                self.hidden_size,
                f"num_heads ({self.num_heads}) times a multiple of 4, because rows and "
                "columns each rotate half of a head in pairs",
            )
        if self.position_grid**2 != self.num_position_embeddings:
            refuse("num_position_embeddings", self.num_position_embeddings, "a square number")
        check_choice("hidden_act", self.hidden_act, ("gelu_pytorch_tanh",), "the family has no other")
        check_number("initializer_range", self.initializer_range)
        check_number("rope_theta", self.rope_theta, positive=True)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def position_grid(self) -> int:
        """Side of the square table of learned positions."""
        return round(self.num_position_embeddings**0.5)
