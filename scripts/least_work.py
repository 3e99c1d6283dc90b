"""The least work of a dense model, from shapes alone: what a benchmark's seconds are to be held against.

Products count two operations per multiplication. Elementwise work, norms, rotary phases and the tables of softmax are
left out: they are a few per cent.
"""

from __future__ import annotations

import math

from qwen35_jax.config import ModelConfig
from qwen35_jax.spec import hf_tensor_shapes

BESIDE_THE_LAYERS = ("mtp.", "model.visual.")


def layer_weights(config: ModelConfig) -> int:
    """Numbers in all weights of the text model's layers, the final norm included."""
    outside = ("embed_tokens.weight", "lm_head.weight")
    return sum(
        math.prod(shape)
        for name, shape in hf_tensor_shapes(config).items()
        if not name.startswith(BESIDE_THE_LAYERS) and not name.endswith(outside)
    )


def prefill_flops(config: ModelConfig, tokens: int) -> int:
    """Of one row: every weight for every token, causal attention, the delta rule, and logits of the last token."""
    text = config.text
    # Norm weights count too much here, by a ten-thousandth.
    weights = 2 * layer_weights(config) * tokens
    pairs = tokens * (tokens + 1) // 2  # each token attends to itself and those before
    attention = 2 * 2 * text.num_attention_heads * text.head_dim * pairs
    rule = rule_flops(
        tokens, text.linear_num_value_heads, text.linear_key_head_dim, text.linear_value_head_dim
    )
    kinds = text.layer_types
    return (
        weights
        + attention * kinds.count("full_attention")
        + rule * kinds.count("linear_attention")
        + 2 * text.vocab_size * text.hidden_size
    )


def decode_bytes(config: ModelConfig, bytes_per_weight: int) -> int:
    """Of one token: each weight is read once, that of the head too; of the embedding one row."""
    head = config.text.vocab_size * config.text.hidden_size
    return bytes_per_weight * (layer_weights(config) + head + config.text.hidden_size)


def rule_flops(tokens: int, value_heads: int, key_dim: int, value_dim: int) -> int:
    """Of the gated delta rule as it is defined, token by token: read by the key, write, read by the query.

    A chunked method does more: at chunks of 64 tokens and heads of 128 about 1.7 times this.
    """
    return 3 * 2 * key_dim * value_dim * value_heads * tokens
