"""From records of preferences to pairs of documents, and an account of what was left out and why.

A pair is two documents, in each of which the tokens of the answer are trained as `qwen35_jax.training.dataset` has it
for its form. What belongs to the prompt is not: in a chat the turns of the assistant before the answer, in two whole
texts the tokens with which both begin.

What is skipped, and counted: a record with an answer of nothing, one whose answers are the same tokens, which tells
nothing, one with an answer of which nothing would be trained, and one whose documents do not fit into a row together.
They are never cut: what makes an answer the better one may stand at its end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool

from qwen35_jax.errors import PromptError
from qwen35_jax.inference.tokenizer import Tokenizer
from qwen35_jax.training.chat_spans import ChatDocuments
from qwen35_jax.training.dataset import Tally, is_empty_answer, make_document
from qwen35_jax.training.document import Document
from qwen35_jax.training.preference.records import Comparison
from qwen35_jax.training.records import Chat, Completion, DataError, Record, Text


class Pair(NamedTuple):
    """Two answers, each behind the same prompt."""

    chosen: Document
    rejected: Document


@dataclasses.dataclass
class PreferenceSummary:
    """What became of the records of a data set.

    Attributes:
        records: read.
        pairs: made of them.
        tokens: of both documents of each.
        trained_tokens: those among them that are answers.
        empty_answers: skipped, since an answer says nothing.
        identical: skipped, since both answers are the same.
        untrained: skipped, since of an answer nothing would be trained.
        dropped: skipped, since the two documents together are longer than a row.
    """

    records: int = 0
    pairs: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    empty_answers: Tally = dataclasses.field(default_factory=Tally)
    identical: Tally = dataclasses.field(default_factory=Tally)
    untrained: Tally = dataclasses.field(default_factory=Tally)
    dropped: Tally = dataclasses.field(default_factory=Tally)

    def __str__(self) -> str:
        """One line for people."""
        answers = f"{self.trained_tokens:,} of {self.tokens:,} tokens are of answers"
        reasons = (
            self.dropped.told("dropped as longer than a row"),
            self.empty_answers.told("skipped for an empty answer"),
            self.identical.told("skipped with two answers that are the same"),
            self.untrained.told("skipped with nothing to train"),
        )
        return "".join((f"{self.pairs:,} pairs of {self.records:,} records, {answers}", *reasons))


class PreferenceDataset(NamedTuple):
    """Pairs, in the order of their records, and what became of those."""

    pairs: list[Pair]
    summary: PreferenceSummary


def make_preference_dataset(
    records: Iterable[Record[Comparison]],
    tokenizer: Tokenizer,
    chats: ChatDocuments | None,
    *,
    row_length: int,
) -> PreferenceDataset:
    """Makes the pairs of records.

    Args:
        records: from `read_comparisons`, of one file or several after each other.
        tokenizer: of the model.
        chats: for records that are chats; None for a model without a chat template.
        row_length: tokens of both documents together at most.

    Raises:
        DataError: a chat cannot be rendered, or no pair is left; names the line.
    """
    summary = PreferenceSummary()
    pairs = []
    for record in records:
        summary.records += 1
        if _has_empty_answer(record.content):
            summary.empty_answers.add(record)
            continue
        pair = _pair(record, tokenizer, chats)
        length = len(pair.chosen.tokens) + len(pair.rejected.tokens)
        if np.array_equal(pair.chosen.tokens, pair.rejected.tokens):
            summary.identical.add(record)
        elif length > row_length:
            summary.dropped.add(record)
        elif not all(document.trained.any() for document in pair):
            summary.untrained.add(record)
        else:
            pairs.append(pair)
            summary.pairs += 1
            summary.tokens += length
            summary.trained_tokens += sum(int(document.trained.sum()) for document in pair)
    if not pairs:
        raise DataError(f"the data leave no pair to learn from: {summary}")
    return PreferenceDataset(pairs, summary)


def _pair(record: Record[Comparison], tokenizer: Tokenizer, chats: ChatDocuments | None) -> Pair:
    content = record.content
    chosen, rejected = (
        make_document(Record(record.place, answer), tokenizer, chats)
        for answer in (content.chosen, content.rejected)
    )
    if isinstance(content.chosen, Text):
        known = _shared_tokens(chosen, rejected)
        return Pair(*(_trained_from(document, known) for document in (chosen, rejected)))
    if isinstance(content.chosen, Chat):
        turns = _turns_of_prompt(record.place, content.chosen, content.shared, chats)
        return Pair(*(_trained_after_turns(document, turns) for document in (chosen, rejected)))
    return Pair(chosen, rejected)


def _turns_of_prompt(place: str, chat: Chat, shared: int, chats: ChatDocuments | None) -> int:
    """Turns of the assistant that belong to the prompt, as the template writes them."""
    prompt = chat.messages[:shared]
    if chats is None or not any(message["role"] == "assistant" for message in prompt):
        return 0
    try:
        return int(_turns(chats.encode(prompt, chat.tools).trained).max(initial=0))
    except PromptError as error:
        raise DataError(f"{place}: {error}") from error


def _turns(trained: Bool[np.ndarray, " time"]) -> np.ndarray:
    """How many turns, runs of trained tokens, have begun up to each token."""
    return np.cumsum(trained & ~np.concatenate([[False], trained[:-1]]))


def _trained_after_turns(document: Document, turns: int) -> Document:
    return Document(document.tokens, document.trained & (_turns(document.trained) > turns))


def _trained_from(document: Document, known: int) -> Document:
    return Document(document.tokens, document.trained & (np.arange(len(document.tokens)) >= known))


def _shared_tokens(left: Document, right: Document) -> int:
    """Tokens with which both begin."""
    length = min(len(left.tokens), len(right.tokens))
    differ = np.flatnonzero(left.tokens[:length] != right.tokens[:length])
    return int(differ[0]) if len(differ) else length


def _has_empty_answer(content: Comparison) -> bool:
    return any(_says_nothing(answer, content.shared) for answer in (content.chosen, content.rejected))


def _says_nothing(answer: Chat | Completion | Text, shared: int) -> bool:
    if isinstance(answer, Chat):
        messages = answer.messages[shared:]
        return not messages or any(map(is_empty_answer, messages))
    return not (answer.completion if isinstance(answer, Completion) else answer.text).strip()
