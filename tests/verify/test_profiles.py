"""Narrow profiles keep what the shape of a model is about."""

from __future__ import annotations

import pytest

from qwen35_jax.config import ModelConfig, published, published_names
from qwen35_jax.errors import ConfigError
from qwen35_jax.verify.profiles import reduced_profile

DENSE = [name for name in published_names() if published(name).text.moe is None]


@pytest.mark.parametrize("name", DENSE)
def test_depth_and_head_ratios_are_kept_and_widths_are_narrow(name):
    full, narrow = published(name), ModelConfig.from_hf(reduced_profile(published(name)))
    assert narrow.text.layer_types == full.text.layer_types
    assert narrow.text.value_heads_per_key_head == full.text.value_heads_per_key_head
    grouped = [text.num_attention_heads // text.num_key_value_heads for text in (narrow.text, full.text)]
    assert grouped[0] == grouped[1]
    assert narrow.text.num_key_value_heads > 1
    assert narrow.text.linear_num_key_heads > 1
    assert narrow.tie_word_embeddings == full.tie_word_embeddings
    widths = [
        narrow.text.hidden_size,
        narrow.text.intermediate_size,
        narrow.text.head_dim,
        narrow.text.linear_key_head_dim,
        narrow.text.linear_value_head_dim,
        narrow.text.vocab_size,
    ]
    assert len(set(widths)) == len(widths)
    assert max(widths) < 128


def test_a_mixture_of_experts_is_refused():
    with pytest.raises(ConfigError, match="num_experts"):
        reduced_profile(published("Qwen/Qwen3.5-35B-A3B"))
