"""From a JSONL file of preferences to the rows that a run trains on."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from qwen35_jax.inference.chat_template import ChatTemplate
from qwen35_jax.inference.tokenizer import Tokenizer
from qwen35_jax.training.chat_spans import ChatDocuments
from qwen35_jax.training.packing import NO_ROW, Order, PackedRows
from qwen35_jax.training.preference.dataset import Pair, PreferenceSummary, make_preference_dataset
from qwen35_jax.training.preference.objective import PreferenceBatch
from qwen35_jax.training.preference.records import read_comparisons
from qwen35_jax.training.records import Chat


def packed_pairs(
    file: str, model_folder: Path, *, row_length: int, pad_id: int, order: Order = "shuffled"
) -> tuple[PackedRows, PreferenceSummary]:
    """The rows of a file, and what became of its records.

    Args:
        file: see `qwen35_jax.training.preference.records`.
        model_folder: with the tokenizer and, for chats, the chat template.
        row_length: tokens of a row, and of the two documents of a pair together at most.
        pad_id: token that fills rows up.
        order: of the rows, see `PackedRows`.

    Raises:
        PromptError: the model has no tokenizer, or for chats no usable template.
        DataError: a line cannot be used, or no pair is left; names the line.
    """
    records = read_comparisons(file)
    tokenizer = Tokenizer.from_folder(model_folder)
    chats = None
    if any(isinstance(record.content.chosen, Chat) for record in records):
        chats = ChatDocuments(ChatTemplate.from_folder(model_folder), tokenizer)
    pairs, summary = make_preference_dataset(records, tokenizer, chats, row_length=row_length)
    return pack_pairs(pairs, row_length, pad_id, order=order), summary


def pack_pairs(
    pairs: Iterable[Pair], row_length: int, pad_id: int = 0, *, order: Order = "shuffled"
) -> PackedRows:
    """Rows in which the two documents of a pair stand next to each other, the chosen one first."""
    documents = list(itertools.chain.from_iterable(pairs))
    return PackedRows(documents, row_length, pad_id, together=2, order=order)


@dataclasses.dataclass(frozen=True)
class ReferencedRows:
    """Rows of pairs with what the reference says of them, for `Batches`.

    Attributes:
        packed: from `pack_pairs`.
        reference: log-probabilities of the answers, in the order of the documents of `packed`, from
            `reference_log_probabilities` or `load_reference`.
    """

    packed: PackedRows
    reference: Float[np.ndarray, " documents"]

    def __len__(self) -> int:
        return len(self.packed)

    def batch(self, indices: Int[np.ndarray, "micro_batches rows"]) -> PreferenceBatch:
        """See `PackedRows.batch`."""
        # Any, since the field is declared for the device's array.
        reference: Any = np.zeros((indices.size, self.packed.most_documents), self.reference.dtype)
        for row, index in zip(reference, indices.flat, strict=True):
            if index != NO_ROW:
                documents = self.packed.rows[index]
                row[: len(documents)] = self.reference[documents]
        return PreferenceBatch(*self.packed.batch(indices), reference.reshape(*indices.shape, -1))

    def fingerprint(self) -> str:
        """That of the pairs. The reference is not in it: a run that is resumed has its own, which it has kept."""
        return self.packed.fingerprint()
