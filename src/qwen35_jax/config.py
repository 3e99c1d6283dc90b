"""Model configuration: what a Hugging Face `config.json` of the Qwen3.5 family says, as frozen dataclasses.

Field names are those of the Hugging Face file, so that a reader can hold one beside the other.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

LayerKind = Literal["linear_attention", "full_attention"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of the full-attention layers (`rope_parameters`)."""

    rope_type: Literal["default", "yarn"] = "default"
    rope_theta: float = 10_000.0
    partial_rotary_factor: float = 0.25
    mrope_section: tuple[int, int, int] = (11, 11, 10)
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Sparse feed-forward of the `qwen3_5_moe` models."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    router_aux_loss_coef: float = 0.001


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """The language model (`text_config`)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int | None
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    layer_types: tuple[LayerKind, ...]
    linear_conv_kernel_dim: int = 4
    hidden_act: Literal["silu"] = "silu"
    output_gate_type: Literal["silu", "sigmoid"] = "silu"
    max_position_embeddings: int = 32_768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_dropout: float = 0.0
    rope: RopeConfig = RopeConfig()
    mtp_num_hidden_layers: int = 0
    moe: MoEConfig | None = None
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of each attention head that are rotated."""
        return int(self.head_dim * self.rope.partial_rotary_factor)

    @property
    def value_heads_per_key_head(self) -> int:
        return self.linear_num_value_heads // self.linear_num_key_heads


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A whole checkpoint: the text model, and what stands beside it."""

    text: TextConfig
    tie_word_embeddings: bool = False
