"""Small models of transformers that the tests of this folder save, load and run."""

from __future__ import annotations

from typing import Any

import torch

from qwen35_jax.verify.reference import ReferenceModel, random_reference
from scripts.make_golden import CONFIG as GOLDEN_CONFIG

VOCAB = 89
TEXT: dict[str, Any] = GOLDEN_CONFIG | {"vocab_size": VOCAB, "hidden_size": 28, "intermediate_size": 44}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "patch_size": 4,
    "num_position_embeddings": 36,
    "out_hidden_size": TEXT["hidden_size"],
}


def text_config(**changes: Any) -> dict[str, Any]:
    return TEXT | changes


def vision_language_config(*, tied: bool) -> dict[str, Any]:
    # The class asks the flag at the top; published files of the smaller models set both.
    text = TEXT | {"tie_word_embeddings": tied}
    tokens = {
        "image_token_id": 80,
        "video_token_id": 81,
        "vision_start_token_id": 82,
        "vision_end_token_id": 83,
    }
    return {"text_config": text, "vision_config": VISION, "tie_word_embeddings": tied, **tokens}


def float32_model(config: dict[str, Any], seed: int) -> ReferenceModel:
    """Random weights that need all of float32's digits, so that a narrower type on the way shows.

    The embedding is small: under a tied head a large one makes every token its own successor.
    """
    model = random_reference(config, seed, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0 + 1.0 / 3000)
        model.get_input_embeddings().weight.mul_(0.1)
    return model
