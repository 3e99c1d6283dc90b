"""How many tokens a pass of nano gives when its head drafts, on beginnings that the head has not learned from."""

from __future__ import annotations

import random

import numpy as np

from qwen35_jax.inference import GenerationSettings, generate
from qwen35_jax.inference.runnable import RunnableModel
from qwen35_jax.inference.speculation import Speculation
from scripts.build_nano.continuations import KINDS, beginning
from scripts.build_nano.corpus import Corpus

DRAFTS = (1, 2, 4)
NEW_TOKENS = 128


def tokens_per_pass(model: RunnableModel, corpus: Corpus, *, seed: int, count: int = 32) -> dict[str, float]:
    """Mean tokens a pass, greedily, past the end of answers, by kind of document and number of drafts.

    Args:
        model: with its head.
        corpus: source of the beginnings.
        seed: of the drawing; another one than that of the rows which the head has learned from.
        count: beginnings of each kind.

    Returns:
        By names such as `recall_2_drafts`.
    """
    rng = random.Random(f"acceptance/{seed}")
    prompts = [beginning(corpus, kind, rng) for kind in KINDS for _ in range(count)]
    settings = GenerationSettings(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    measured = {}
    for drafts in DRAFTS:
        answers = generate(model, prompts, settings, speculation=Speculation(drafts)).generations
        means = (
            np.array([answer.tokens_per_pass for answer in answers]).reshape(len(KINDS), count).mean(axis=1)
        )
        measured |= {f"{kind}_{drafts}_drafts": float(mean) for kind, mean in zip(KINDS, means, strict=True)}
    return measured
