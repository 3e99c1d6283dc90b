"""A tiny model with every size different, and tokenizers of the family's kind."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from qwen35_jax.config import ModelConfig, RopeConfig, TextConfig
from qwen35_jax.model import init_model

VOCABULARY = 97


@dataclasses.dataclass(frozen=True)
class TinyModel:
    """What `generate` asks of a loaded model."""

    config: ModelConfig
    graphdef: nnx.GraphDef
    params: dict[str, Any]
    folder: Path | None = None


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    return ModelConfig(
        text=TextConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=80,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=12,
            layer_types=("linear_attention",) * 3 + ("full_attention",),
            max_position_embeddings=1024,
            initializer_range=0.2,
            rope=RopeConfig(mrope_section=(2, 1, 1)),
            eos_token_id=(),
        ),
        tie_word_embeddings=True,
    )


@pytest.fixture(scope="session")
def tiny(tiny_config: ModelConfig) -> TinyModel:
    graphdef, params = init_model(tiny_config, seed=0, parameter_dtype=jnp.float32, dtype=jnp.float32)
    return TinyModel(tiny_config, graphdef, params)
