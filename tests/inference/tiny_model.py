"""A tiny model with every size different, and a tokenizer for it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx
from tokenizers import decoders, models, pre_tokenizers

from qwen35_jax.config import ModelConfig
from qwen35_jax.inference.tokenizer import Tokenizer
from qwen35_jax.model import abstract_model
from tests.small_text_model import FULL, LINEAR, small_config

VOCABULARY = 97
CONTEXT = 700


@dataclasses.dataclass(frozen=True)
class TinyModel:
    """What `generate` asks of a loaded model."""

    config: ModelConfig
    graphdef: nnx.GraphDef
    parameters: dict[str, Any]
    folder: Path | None = None


def tiny_config() -> ModelConfig:
    """A model with one layer of each kind and a tied head."""
    config = small_config(
        (LINEAR, FULL),
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=80,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        pad_token_id=9,
    )
    return dataclasses.replace(config, tie_word_embeddings=True)


def tiny_model() -> TinyModel:
    """Random weights, with a decay so weak that what a row has read stays in its state."""
    config = tiny_config()
    graphdef, shapes = abstract_model(config, parameter_dtype=jnp.float32, dtype=jnp.float32)
    source = np.random.default_rng(0)

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        offset = -4.0 if path[-1].key == "A_log" else 0.0
        return jnp.asarray(offset + 0.2 * source.normal(size=leaf.shape), leaf.dtype)

    return TinyModel(config, graphdef, jax.tree_util.tree_map_with_path(draw, shapes))


def byte_symbols() -> dict[int, str]:
    """The printable character by which byte-level vocabularies write each byte."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


def ascii_tokenizer() -> Tokenizer:
    """Ids 0 to 94 are the printable characters, 95 is `<|im_end|>`; the model's row 96 has no token."""
    symbols = byte_symbols()
    backend = tokenizers.Tokenizer(models.BPE({symbols[32 + i]: i for i in range(95)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("<|im_end|>", special=True, normalized=False)])
    return Tokenizer(backend, {"eos_token": "<|im_end|>"})
