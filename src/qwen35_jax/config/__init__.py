"""Model configuration: a Hugging Face `config.json` of the Qwen3.5 family as frozen dataclasses."""

from qwen35_jax.config.model import ModelConfig, require_dense_text
from qwen35_jax.config.published import published, published_names
from qwen35_jax.config.text import LayerKind, MoEConfig, RopeConfig, TextConfig
from qwen35_jax.config.vision import VisionConfig

__all__ = [
    "LayerKind",
    "MoEConfig",
    "ModelConfig",
    "RopeConfig",
    "TextConfig",
    "VisionConfig",
    "published",
    "published_names",
    "require_dense_text",
]
