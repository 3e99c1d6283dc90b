"""The language model's configuration (`text_config` of a Hugging Face `config.json`), as frozen dataclasses.

Field names are those of the Hugging Face file, so that a reader can hold one beside the other. Every object
is checked when it is made, also by `dataclasses.replace`, so that code that receives one need not ask again.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from qwen35_jax.config.checks import (
    check_choice,
    check_flag,
    check_integer,
    check_layer_count,
    check_multiple,
    check_number,
    refuse,
)

LayerKind = Literal["linear_attention", "full_attention"]
LAYER_KINDS: tuple[LayerKind, ...] = ("linear_attention", "full_attention")
DEFAULT_MROPE_SECTION = (11, 11, 10)


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of the full-attention layers (`rope_parameters`).

    The fields from `factor` on belong to YaRN (Peng et al. 2023, arXiv:2309.00071), which stretches the
    context from `original_max_position_embeddings` to `factor` times as many tokens.
    """

    rope_type: Literal["default", "yarn"] = "default"
    rope_theta: float = 10_000.0
    partial_rotary_factor: float = 0.25
    mrope_section: tuple[int, int, int] = DEFAULT_MROPE_SECTION
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        check_choice(
            "rope_type", self.rope_type, ("default", "yarn"), "other kinds of scaling are not supported"
        )
        check_number("rope_theta", self.rope_theta, positive=True)
        check_number("partial_rotary_factor", self.partial_rotary_factor, positive=True)
        if self.partial_rotary_factor > 1:
            refuse("partial_rotary_factor", self.partial_rotary_factor, "a share of the head, at most 1")
        if not isinstance(self.mrope_section, tuple) or len(self.mrope_section) != 3:
            refuse("mrope_section", self.mrope_section, "three whole numbers (time, height, width)")
        for extent in self.mrope_section:
            check_integer("mrope_section", extent, minimum=0)
        for name in ("factor", "attention_factor"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), positive=True)
        for name in ("mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name))
        if self.original_max_position_embeddings is not None:
            check_integer("original_max_position_embeddings", self.original_max_position_embeddings)
        check_number("beta_fast", self.beta_fast, positive=True)
        check_number("beta_slow", self.beta_slow, positive=True)
        if self.beta_fast < self.beta_slow:
            refuse("beta_fast", self.beta_fast, f"at least beta_slow ({self.beta_slow})", "swap the two")
        check_flag("truncate", self.truncate)
        if self.rope_type == "yarn":
            if self.factor is None or self.factor < 1:
                refuse(
                    "factor",
                    self.factor,
                    "a number of at least 1 for rope_type 'yarn'",
                    "say how far to stretch",
                )
            if self.original_max_position_embeddings is None:
                refuse(
                    "original_max_position_embeddings",
                    None,
                    "a whole number for rope_type 'yarn'",
                    "give the context length that the model was trained for",
                )
        elif self.factor not in (None, 1):
            # Left alone, a wish for a longer context would be ignored without a word.
            refuse(
                "factor",
                self.factor,
                "no factor for rope_type 'default'",
                "set rope_type to 'yarn' or drop it",
            )


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Sparse feed-forward of the `qwen3_5_moe` models: in each layer `num_experts` and a shared one."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    router_aux_loss_coef: float = 0.001

    def __post_init__(self) -> None:
        for name in (
            "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
        ):  # fmt: skip
            check_integer(name, getattr(self, name))
        if self.num_experts_per_tok > self.num_experts:
            refuse(
                "num_experts_per_tok", self.num_experts_per_tok, f"at most num_experts ({self.num_experts})"
            )
        check_number("router_aux_loss_coef", self.router_aux_loss_coef)


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """The language model (`text_config`). `intermediate_size` is None exactly where `moe` is given."""

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
    unroll_layers: bool = False
    """How to run, not what to compute, and no part of the file: write every layer out in the compiled program instead
    of scanning over stacked ones. On a CPU this spares a copy of each layer's weights at every step."""

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
            "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
            "linear_value_head_dim", "linear_conv_kernel_dim", "max_position_embeddings",
        ):  # fmt: skip
            check_integer(name, getattr(self, name))
        check_layer_count("num_hidden_layers", self.num_hidden_layers)
        check_multiple(
            "num_attention_heads", self.num_attention_heads, "num_key_value_heads", self.num_key_value_heads
        )
        check_multiple(
            "linear_num_value_heads",
            self.linear_num_value_heads,
            "linear_num_key_heads",
            self.linear_num_key_heads,
        )
        if self.moe is None:
            check_integer("intermediate_size", self.intermediate_size)
        elif self.intermediate_size is not None:
            refuse(
                "intermediate_size",
                self.intermediate_size,
                "nothing in a mixture-of-experts model",
                "its sizes are moe_intermediate_size and shared_expert_intermediate_size",
            )
        self._check_layer_types()
        check_choice("hidden_act", self.hidden_act, ("silu",), "the family has no other")
        check_choice("output_gate_type", self.output_gate_type, ("silu", "sigmoid"))
        check_number("initializer_range", self.initializer_range)
        check_number("rms_norm_eps", self.rms_norm_eps, positive=True)
        check_flag("attention_bias", self.attention_bias)
        check_flag("unroll_layers", self.unroll_layers)
        check_number("attention_dropout", self.attention_dropout)
        if self.attention_dropout >= 1:
            refuse("attention_dropout", self.attention_dropout, "a probability below 1")
        check_layer_count("mtp_num_hidden_layers", self.mtp_num_hidden_layers, minimum=0)
        self._check_rotary()
        self._check_token_ids()

    def _check_layer_types(self) -> None:
        if not isinstance(self.layer_types, tuple):
            refuse("layer_types", self.layer_types, "a tuple of layer kinds")
        if len(self.layer_types) != self.num_hidden_layers:
            refuse(
                "layer_types",
                f"{len(self.layer_types)} entries",
                f"one for each of num_hidden_layers ({self.num_hidden_layers})",
                "correct one of the two",
            )
        for index, kind in enumerate(self.layer_types):
            check_choice(f"layer_types[{index}]", kind, LAYER_KINDS)

    def _check_rotary(self) -> None:
        half, section = self.rotary_dim // 2, self.rope.mrope_section
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            refuse(
                "partial_rotary_factor",
                self.rope.partial_rotary_factor,
                f"a share that rotates an even number of the {self.head_dim} dimensions of a head",
            )
        # A file that names no section gets the family's, which reaches past the end of a smaller head's
        # frequencies; the reference ignores that part. Any other section has to fit.
        if sum(section) != half and not (section == DEFAULT_MROPE_SECTION and half < sum(section)):
            refuse(
                "mrope_section",
                list(section),
                f"a sum of {half}, half of the {self.rotary_dim} rotated dimensions "
                f"(head_dim {self.head_dim} times partial_rotary_factor {self.rope.partial_rotary_factor:g})",
                "correct one of the three",
            )

    def _check_token_ids(self) -> None:
        for name in ("bos_token_id", "pad_token_id"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), minimum=0)
        if not isinstance(self.eos_token_id, tuple):
            refuse("eos_token_id", self.eos_token_id, "a tuple of token ids")
        for token in self.eos_token_id:
            check_integer("eos_token_id", token, minimum=0)

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of each attention head that are rotated."""
        return int(self.head_dim * self.rope.partial_rotary_factor)

    @property
    def value_heads_per_key_head(self) -> int:
        return self.linear_num_value_heads // self.linear_num_key_heads

    @property
    def max_context(self) -> int:
        """Most tokens that a sequence may have.

        With YaRN it is `factor * original_max_position_embeddings`. A `max_position_embeddings` that differs
        from the original length is a cap on that: the file states how far the model is meant to go.
        """
        original = self.rope.original_max_position_embeddings
        if self.rope.rope_type != "yarn" or self.rope.factor is None or original is None:
            return self.max_position_embeddings
        stretched = int(self.rope.factor * original)
        if self.max_position_embeddings == original:
            return stretched
        return min(stretched, self.max_position_embeddings)
