"""Narrow models with the depth and the head ratios of the published ones, to be verified in seconds."""

from __future__ import annotations

from typing import Any

from qwen35_jax.config import ModelConfig, require_dense_text

# Widths that differ from each other and from the usual multiples, so that no mistaken axis fits by chance.
HIDDEN_SIZE = 40
INTERMEDIATE_SIZE = 56
VOCAB_SIZE = 101
HEAD_DIM = 32
KEY_DIM = 12
VALUE_DIM = 18
ROTARY_SHARE = 0.25  # of a head: 4 pairs, cut into
MROPE_SECTION = (2, 1, 1)


def reduced_profile(config: ModelConfig) -> dict[str, Any]:
    """A text model with the layers and head ratios of `config`, and everything else narrow.

    Kept: the layer kinds in their order, attention heads per key/value head, value heads per key head, convolution
    taps, rotary base, eps, biases, tying.

    Args:
        config: a dense model's.

    Returns:
        The values of a Hugging Face `config.json`.

    Raises:
        ConfigError: `config` describes a mixture of experts.
    """
    text = require_dense_text(config)
    key_value_heads = min(2, text.num_key_value_heads)
    key_heads = min(2, text.linear_num_key_heads)
    return {
        "model_type": "qwen3_5_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": text.num_hidden_layers,
        "layer_types": list(text.layer_types),
        "num_attention_heads": key_value_heads * (text.num_attention_heads // text.num_key_value_heads),
        "num_key_value_heads": key_value_heads,
        "head_dim": HEAD_DIM,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * text.value_heads_per_key_head,
        "linear_key_head_dim": KEY_DIM,
        "linear_value_head_dim": VALUE_DIM,
        "linear_conv_kernel_dim": text.linear_conv_kernel_dim,
        "rms_norm_eps": text.rms_norm_eps,
        "attention_bias": text.attention_bias,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": text.rope.rope_theta,
            "partial_rotary_factor": ROTARY_SHARE,
            "mrope_section": list(MROPE_SECTION),
            "mrope_interleaved": True,
        },
    }
