"""Config fields that no published model sets, against transformers in float64: YaRN and attention biases."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from qwen35_jax.config import ModelConfig
from qwen35_jax.model import forward
from qwen35_jax.verify.comparison import random_pair
from qwen35_jax.verify.float64 import float64_arithmetic
from tests.reference.tiny_reference import TEXT, VOCAB, text_config

pytestmark = pytest.mark.reference

# Four layers are enough, and 300 tokens pass the length that the rotary embedding is stretched from.
YARN = TEXT["rope_parameters"] | {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_theta": 500.0,
}
VARIANTS = {
    "YaRN": {"rope_parameters": YARN},
    "YaRN with its own ramp and gain": {
        "rope_parameters": YARN
        | {"beta_fast": 24.0, "beta_slow": 1.5, "attention_factor": 1.3, "truncate": False}
    },
    "attention biases": {"attention_bias": True},
    "irregular layers": {
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    },
}

_logits = jax.jit(functools.partial(forward, rematerialize="none"), static_argnums=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_equals_the_reference(name, x64):
    pair = random_pair(text_config(num_hidden_layers=4, **VARIANTS[name]), 11, jnp.dtype("float64"))
    tokens = np.random.default_rng(12).integers(0, VOCAB, (2, 300))
    ours = _logits(pair.graphdef, pair.parameters, tokens)
    with float64_arithmetic(), torch.no_grad():
        expected = pair.reference(input_ids=torch.from_numpy(tokens), use_cache=False).logits.numpy()
    assert np.abs(ours - expected).max() <= 1e-12 * np.abs(expected).max()
    # What the class of transformers holds after all, this package reads as the model it built.
    assert ModelConfig.from_hf(pair.reference.config.to_dict()).text == pair.config.text
