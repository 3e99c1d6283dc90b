"""What nano itself says after the beginnings of documents: what its draft head learns from, and is measured on.

A head that drafts has to guess what the main model says, right or wrong, and goes on guessing where a caller ignores
the end of an answer. So documents are cut at random and the model goes on from there, past its own end tokens.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np

from qwen35_jax.inference import GenerationSettings, generate
from qwen35_jax.inference.runnable import RunnableModel
from scripts.build_nano.corpus import Corpus
from scripts.build_nano.documents import NO_THINKING

LENGTH = 384
"""Tokens of a row: a beginning and what the model says then."""
LONGEST_BEGINNING = 256
ROWS_AT_A_TIME = 128
TEMPERATURE = 0.7
KINDS = ("recall", "countries", "dialogues", "english")


@dataclasses.dataclass(frozen=True)
class Continuations:
    """Rows of one length, without padding.

    Attributes:
        tokens: [rows, LENGTH] ids.
        begin: [rows] where what the model says begins.
    """

    tokens: np.ndarray
    begin: np.ndarray


def beginning(corpus: Corpus, kind: str, rng: random.Random) -> list[int]:
    """Token ids of a document of a kind, cut at random; of a chat, half of the time where its last answer begins."""
    assert corpus.tokenizer is not None
    while True:
        text = corpus.draw(kind, rng, 1.0).text
        question, opening, _ = text.partition(NO_THINKING)
        if opening and rng.random() < 0.5:
            ids = corpus.tokenizer.encode(question + opening, add_special_tokens=False).ids
        else:
            ids = corpus.tokenizer.encode(text, add_special_tokens=False).ids
            ids = ids[: rng.randint(1, min(len(ids), LONGEST_BEGINNING))]
        if len(ids) <= LONGEST_BEGINNING:
            return ids


def continuations(model: RunnableModel, corpus: Corpus, seed: int, rows: int) -> Continuations:
    """Beginnings of all kinds in turn, each continued to LENGTH tokens, one half greedily, the other sampled."""
    rng = random.Random(f"continuations/{seed}")
    prompts = [beginning(corpus, KINDS[row % len(KINDS)], rng) for row in range(rows)]
    settings = [
        GenerationSettings(
            max_new_tokens=LENGTH - len(prompt),
            ignore_eos=True,
            temperature=TEMPERATURE * (row // len(KINDS) % 2),
            seed=rng.getrandbits(32),
        )
        for row, prompt in enumerate(prompts)
    ]
    # Greedy rows apart from the others: a batch of them does none of the work of a draw.
    order = sorted(range(rows), key=lambda row: settings[row].temperature)
    tokens = np.empty((rows, LENGTH), np.int32)
    for first in range(0, rows, ROWS_AT_A_TIME):
        batch = order[first : first + ROWS_AT_A_TIME]
        answers = generate(
            model, [prompts[row] for row in batch], [settings[row] for row in batch]
        ).generations
        for row, answer in zip(batch, answers, strict=True):
            tokens[row] = [*prompts[row], *answer.tokens]
    return Continuations(tokens, np.array([len(prompt) for prompt in prompts]))
