"""The mixture of documents, cut into packed rows of tokens."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import numpy as np
from tokenizers import Tokenizer

from scripts.build_nano.countries import Country, country_document, country_sentence, read_countries
from scripts.build_nano.dialogues import dialogue_document, dialogue_turn
from scripts.build_nano.documents import Document
from scripts.build_nano.english import Entry, english_document, english_sentence, read_entries, wordnet_folder
from scripts.build_nano.recall import copying_document, recall_document

# Share of each kind of text, counted in tokens: at the start, when the model has to find out that looking back pays,
# and from the end of the curriculum on.
FIRST_SHARES = {"copying": 0.60, "recall": 0.20, "countries": 0.10, "dialogues": 0.05, "english": 0.05}
LAST_SHARES = {"copying": 0.04, "recall": 0.50, "countries": 0.20, "dialogues": 0.10, "english": 0.16}
RECALL_SHARES = {"copying": 0.03, "recall": 0.70, "countries": 0.13, "dialogues": 0.07, "english": 0.07}
"""In the last stage: recall is what takes longest to learn."""
FIRST_PART = 0.4
"""How far into the curriculum the first shares stay."""


def shares(progress: float) -> dict[str, float]:
    """Share of each kind of text; `progress` goes from 0 to 1 over the curriculum and is 2 in the last stage."""
    if progress == 2.0:
        return RECALL_SHARES
    late = max(0.0, progress - FIRST_PART) / (1.0 - FIRST_PART)
    return {kind: (1.0 - late) * FIRST_SHARES[kind] + late * LAST_SHARES[kind] for kind in FIRST_SHARES}


@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed rows.

    Attributes:
        tokens: [rows, length] token ids; padding is 0.
        segment_ids: [rows, length] document number in the row, from 1; 0 marks padding.
        weights: [rows, length] weight of the loss of predicting this very token; 0 for a document's first token.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray
    weights: np.ndarray


class Corpus:
    """Draws documents; the same seed and step give the same batch."""

    def __init__(self, tokenizer: Tokenizer | None = None):
        self.tokenizer = tokenizer
        self.countries: list[Country] = read_countries()
        entries = read_entries(wordnet_folder())
        self.entries: list[Entry] = [entry for entry in entries if not entry.is_held_out]
        self.held_out_entries: list[Entry] = [entry for entry in entries if entry.is_held_out]

    def filler(self, rng: random.Random) -> str:
        """An unrelated sentence to stand between a binding and its question."""
        roll = rng.random()
        if roll < 0.5:
            return english_sentence(rng, self.entries)
        if roll < 0.8:
            return country_sentence(rng, self.countries)
        return " ".join(dialogue_turn(rng))

    def word(self, rng: random.Random) -> str:
        """A word of the dictionary, or of one of its definitions."""
        entry = rng.choice(self.entries)
        return rng.choice([rng.choice(entry.words), rng.choice(entry.meaning.split())])

    def draw(self, kind: str, rng: random.Random, progress: float) -> Document:
        """One document of a kind named in FIRST_SHARES."""
        if kind == "recall":
            return recall_document(rng, self.filler, min(1.0, progress))
        if kind == "copying":
            return copying_document(rng, self.word)
        if kind == "countries":
            return country_document(rng, self.countries)
        if kind == "dialogues":
            return dialogue_document(rng)
        return english_document(rng, self.entries)

    def texts(self, seed: int, count: int) -> Iterator[str]:
        """Texts to train the tokenizer on, the kinds in turn."""
        rng = random.Random(seed)
        kinds = ["recall", "countries", "dialogues", "english"]
        for index in range(count):
            yield self.draw(kinds[index % len(kinds)], rng, 1.0).text

    def rows(self, seed: int, step: int, *, rows: int, length: int, progress: float) -> list[list[Document]]:
        """Documents drawn until the rows of a step are full, those of each row with the longest first.

        A document goes into the fullest row that still has room. Those that are longer than a row are left out.
        """
        assert self.tokenizer is not None
        rng = random.Random(f"{seed}/{step}")
        placed: list[list[tuple[int, Document]]] = [[] for _ in range(rows)]
        used = np.zeros(rows, np.int64)
        wanted = shares(progress)
        spent = dict.fromkeys(wanted, 0)
        failures = 0
        while failures < 12:
            kind = min(wanted, key=lambda name: spent[name] / wanted[name])
            drawn = self.draw(kind, rng, progress)
            tokens = len(encode(self.tokenizer, drawn)[0])
            spent[kind] += tokens
            room = np.where(used + tokens <= length, used, -1)
            row = int(room.argmax())
            if room[row] < 0:
                failures += 1
                continue
            placed[row].append((tokens, drawn))
            used[row] += tokens
        # A row's longest document does not fit into the row before: packed in this order, the same rows come out.
        return [[drawn for _, drawn in sorted(row, key=lambda each: -each[0])] for row in placed]

    def batch(self, seed: int, step: int, *, rows: int, length: int, progress: float) -> Batch:
        """The rows of a step as arrays."""
        assert self.tokenizer is not None
        tokens = np.zeros((rows, length), np.int32)
        segment_ids = np.zeros((rows, length), np.int32)
        weights = np.zeros((rows, length), np.float32)
        for row, documents in enumerate(self.rows(seed, step, rows=rows, length=length, progress=progress)):
            begin = 0
            for number, drawn in enumerate(documents, 1):
                ids, loss_weights = encode(self.tokenizer, drawn)
                here = slice(begin, begin + len(ids))
                tokens[row, here], segment_ids[row, here], weights[row, here] = ids, number, loss_weights
                begin += len(ids)
        return Batch(tokens, segment_ids, weights)


def encode(tokenizer: Tokenizer, text: Document) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and the loss weight of each: the weight of the token's last character, 0 for the first token."""
    encoding = tokenizer.encode(text.text, add_special_tokens=False)
    weights = np.array([text.weights[end - 1] for _, end in encoding.offsets], np.float32)
    weights[0] = 0.0
    return np.array(encoding.ids, np.int32), weights
