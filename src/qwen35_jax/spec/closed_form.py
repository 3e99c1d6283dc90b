"""What a model keeps and multiplies per token, from its configuration alone.

A Gated DeltaNet layer keeps a table of key_dim x value_dim numbers per value head, and the last inputs of its
convolution, whatever the length. An attention layer keeps a key and a value per key/value head and token.

Per token, a table costs four multiplications for each of its numbers: its decay, the read with the key, the write, and
the read with the query. An attention layer multiplies, for each earlier token, every query head with a key and a
weight with a value. Every weight is multiplied once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from qwen35_jax.config import ModelConfig
from qwen35_jax.spec import specify
from qwen35_jax.spec.node import Part

MULTIPLICATIONS_OF_A_TABLE = 4
"""For each of its numbers and each token: decay, S^T k, the write k v^T, and S^T q."""

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclasses.dataclass(frozen=True)
class ClosedForm:
    """Counts of one model at one context.

    Attributes:
        parameters: by part of the model, see `qwen35_jax.spec`.
        text_parameters: of the language model without multi-token prediction and vision; a tied head counts once.
        active_parameters: those of them that one token meets.
        layers: of each kind.
        tables_per_layer: of one DeltaNet layer, a table per value head.
        numbers_per_token: in the keys and values of all attention layers.
        table_numbers: in the tables of all DeltaNet layers.
        window_numbers: in the windows of their convolutions.
        weight_multiplications: per token, with the weights.
        per_earlier_token: multiplications per token and earlier token.
        crossing_tokens: the context from which on the tables of a DeltaNet layer are no larger than the keys and values
            of an attention layer; None without one of the two.
        context: tokens per row, of what follows.
        batch: rows, of what follows.
        cache_bytes: keys, values and windows in the dtype of the computation, tables in float32 at least.
        pure_attention_cache_bytes: keys and values if every layer were an attention layer.
    """

    parameters: Mapping[Part, int]
    text_parameters: int
    active_parameters: int
    layers: Mapping[str, int]
    tables_per_layer: int
    numbers_per_token: int
    table_numbers: int
    window_numbers: int
    weight_multiplications: int
    per_earlier_token: int
    crossing_tokens: int | None
    context: int
    batch: int
    cache_bytes: int
    pure_attention_cache_bytes: int

    @property
    def fixed_numbers(self) -> int:
        """What is kept whatever the length: tables and windows."""
        return self.table_numbers + self.window_numbers

    @property
    def table_multiplications(self) -> int:
        """Per token, with the tables of all layers."""
        return MULTIPLICATIONS_OF_A_TABLE * self.table_numbers

    def to_json(self) -> dict[str, Any]:
        """The closed-form part of what `qwen35 plan --json` prints."""
        return {
            "parameters": {
                "text": self.text_parameters,
                "active": self.active_parameters,
                "by_part": dict(self.parameters),
            },
            "layers": dict(self.layers),
            "tables_per_layer": self.tables_per_layer,
            "numbers_per_token": self.numbers_per_token,
            "fixed_numbers": self.fixed_numbers,
            "table_numbers": self.table_numbers,
            "multiplications": {
                "weights": self.weight_multiplications,
                "tables": self.table_multiplications,
                "per_earlier_token": self.per_earlier_token,
            },
            "crossing_tokens": self.crossing_tokens,
            "context": self.context,
            "batch": self.batch,
            "cache_bytes": self.cache_bytes,
            "pure_attention_cache_bytes": self.pure_attention_cache_bytes,
        }


def closed_form(config: ModelConfig, *, context: int, batch: int, dtype: str) -> ClosedForm:
    """Counts a model.

    Args:
        config: of a checkpoint, dense or with experts.
        context: tokens per row of the cache.
        batch: rows of the cache.
        dtype: of the computation, one of `BYTES`.
    """
    specification, text = specify(config), config.text
    linear, full = (text.layer_types.count(kind) for kind in ("linear_attention", "full_attention"))
    key_width = text.linear_num_key_heads * text.linear_key_head_dim
    value_width = text.linear_num_value_heads * text.linear_value_head_dim
    table = text.linear_num_value_heads * text.linear_key_head_dim * text.linear_value_head_dim
    window = (text.linear_conv_kernel_dim - 1) * (2 * key_width + value_width)
    per_token = 2 * text.num_key_value_heads * text.head_dim
    # An untied table of token vectors is only looked up.
    looked_up = 0 if config.tie_word_embeddings else specification.by_part["embedding"]
    narrow, wide = BYTES[dtype], max(4, BYTES[dtype])
    fixed_bytes = linear * (window * narrow + table * wide)
    return ClosedForm(
        parameters=specification.by_part,
        text_parameters=specification.text_parameters,
        active_parameters=specification.active_parameters,
        layers={"linear_attention": linear, "full_attention": full},
        tables_per_layer=text.linear_num_value_heads,
        numbers_per_token=full * per_token,
        table_numbers=linear * table,
        window_numbers=linear * window,
        weight_multiplications=specification.active_parameters - looked_up,
        per_earlier_token=full * 2 * text.num_attention_heads * text.head_dim,
        crossing_tokens=-(-table // per_token) if linear and full else None,
        context=context,
        batch=batch,
        cache_bytes=batch * (fixed_bytes + full * per_token * context * narrow),
        pure_attention_cache_bytes=batch * text.num_hidden_layers * per_token * context * narrow,
    )
