"""From records to the documents that a model learns, and an account of what was left out and why.

What a line becomes. A chat: see `chat_spans`. A text: all of its tokens but the first, which nothing comes before, and
one stop token. A completion: its own tokens and one stop token, behind those of its prompt; both are encoded apart, as
they will be when the model is asked. The stop token of texts and completions is `<|endoftext|>`, with which the family
ends documents, or else the end token that the tokenizer's config names; where the text ends with it already, none is
added. Parts with weights are one text, encoded as if it were in one piece, and a token has the weight of the part that
it ends in; no stop token is added, since nothing says what it would weigh. Names of special tokens in texts,
completions and parts are these tokens, so that text from a template can be learned.

What is skipped, and counted. A chat in which an assistant's message has neither content nor a call, or a completion of
nothing: it is nearly always a fault of the data, would teach the model to say nothing, and one such line is no reason
to stop a run of thousands. A line of which nothing would be trained. A document longer than the context, unless it is
to be cut; a cut one keeps its beginning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np

from qwen35_jax.errors import ConfigError, PromptError
from qwen35_jax.inference.chat.answer_parser import END_OF_THINK
from qwen35_jax.inference.tokenizer import Tokenizer
from qwen35_jax.training.chat_spans import ChatDocuments
from qwen35_jax.training.document import Document
from qwen35_jax.training.records import AnyForm, Chat, Completion, DataError, Parts, Record

END_OF_TEXT = "<|endoftext|>"

TooLong = Literal["drop", "cut"]
"""What becomes of a document that is longer than the context."""


@dataclasses.dataclass
class Tally:
    """How many records something was true of.

    Attributes:
        count: of records.
        first: file and line of the first one; empty if there is none.
    """

    count: int = 0
    first: str = ""

    def add(self, record: Record[Any]) -> None:
        """Counts one more."""
        self.first = self.first or record.place
        self.count += 1

    def told(self, reason: str) -> str:
        """What follows in a line for people: nothing where there is none."""
        return f"; {self.count:,} {reason} (first: {self.first})" if self.count else ""


@dataclasses.dataclass
class Summary:
    """What became of the records of a data set.

    Attributes:
        records: read.
        documents: made of them.
        tokens: of the documents.
        trained_tokens: those among them that are learned.
        empty_answers: skipped, since an assistant's message or a completion says nothing.
        untrained: skipped, since nothing of them would be learned.
        dropped: skipped, since they are longer than the context.
        cut: kept, but only as far as the context goes. One of which nothing is left to learn is untrained.
    """

    records: int = 0
    documents: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    empty_answers: Tally = dataclasses.field(default_factory=Tally)
    untrained: Tally = dataclasses.field(default_factory=Tally)
    dropped: Tally = dataclasses.field(default_factory=Tally)
    cut: Tally = dataclasses.field(default_factory=Tally)

    def __str__(self) -> str:
        """One line for people."""
        learned = f"{self.trained_tokens:,} of {self.tokens:,} tokens trained"
        reasons = (
            self.dropped.told("dropped as longer than the context"),
            self.cut.told("cut to the context"),
            self.empty_answers.told("skipped for an empty answer"),
            self.untrained.told("skipped with nothing to train"),
        )
        return "".join((f"{self.documents:,} of {self.records:,} records, {learned}", *reasons))


class Dataset(NamedTuple):
    """Documents, in the order of their records, and what became of those."""

    documents: list[Document]
    summary: Summary


def make_dataset(
    records: Iterable[Record[AnyForm]],
    tokenizer: Tokenizer,
    chats: ChatDocuments | None,
    *,
    context: int,
    too_long: TooLong = "drop",
) -> Dataset:
    """Makes the documents of records.

    Args:
        records: from `read_records`, of one file or several after each other.
        tokenizer: of the model.
        chats: for records that are chats; None for a model without a chat template.
        context: tokens of the longest document.
        too_long: what becomes of longer ones.

    Raises:
        ConfigError: the context or `too_long` is none.
        DataError: a chat cannot be rendered, or no document is left; names the line.
    """
    if context < 2:
        raise ConfigError(
            f"context is {context}, expected at least 2 tokens: one to learn from and one to learn"
        )
    if too_long not in ("drop", "cut"):
        raise ConfigError(f"too_long is {too_long!r}, expected 'drop' or 'cut'")
    summary = Summary()
    documents = []
    for record in records:
        summary.records += 1
        if _has_empty_answer(record):
            summary.empty_answers.add(record)
            continue
        document = make_document(record, tokenizer, chats)
        if len(document.tokens) > context:
            if too_long == "drop":
                summary.dropped.add(record)
                continue
            document = document.cut(context)
            if document.trained.any():
                summary.cut.add(record)
        if not document.trained.any():
            summary.untrained.add(record)
            continue
        documents.append(document)
        summary.documents += 1
        summary.tokens += len(document.tokens)
        summary.trained_tokens += int(document.trained.sum())
    if not documents:
        raise DataError(f"the data leave nothing to train: {summary}")
    return Dataset(documents, summary)


def make_document(record: Record[AnyForm], tokenizer: Tokenizer, chats: ChatDocuments | None) -> Document:
    """The document of one record; arguments as for `make_dataset`.

    Raises:
        DataError: a chat cannot be rendered, or a text not be ended; names the line.
    """
    content = record.content
    try:
        if isinstance(content, Chat):
            if chats is None:
                raise PromptError("the model has no chat template: give text, or prompt and completion")
            return chats.encode(content.messages, content.tools)
        if isinstance(content, Parts):
            return _weighed(content, tokenizer)
        prompt, learned = content if isinstance(content, Completion) else ("", content.text)
        known = tokenizer.encode(prompt, add_special_tokens=False)
        tokens = tokenizer.encode(learned, add_special_tokens=False)
    except PromptError as error:
        raise DataError(f"{record.place}: {error}") from error
    stop = _stop_token(tokenizer)
    if tokens[-1:] != [stop]:
        tokens.append(stop)
    trained = np.arange(len(known) + len(tokens)) >= max(len(known), 1)
    return Document(np.asarray(known + tokens, np.int32), trained)


def _weighed(content: Parts, tokenizer: Tokenizer) -> Document:
    texts, weights = zip(*content.parts, strict=True)
    encoding = tokenizer.backend.encode("".join(texts), add_special_tokens=False)
    last_characters = np.array([end for _, end in encoding.offsets], np.int64) - 1
    parts = np.searchsorted(np.cumsum([len(text) for text in texts]), last_characters, side="right")
    of_tokens = np.array(weights, np.float32)[parts]
    of_tokens[:1] = 0
    return Document(np.asarray(encoding.ids, np.int32), of_tokens)


def _stop_token(tokenizer: Tokenizer) -> int:
    stop = tokenizer.token_id(END_OF_TEXT)
    stop = tokenizer.eos_token_id if stop is None else stop
    if stop is None:
        raise DataError(
            f"the tokenizer has neither {END_OF_TEXT} nor an eos_token, so no text can be ended: name an eos_token in "
            "tokenizer_config.json"
        )
    return stop


def _has_empty_answer(record: Record[AnyForm]) -> bool:
    content = record.content
    if isinstance(content, Completion):
        return not content.completion.strip()
    return isinstance(content, Chat) and any(map(is_empty_answer, content.messages))


def is_empty_answer(message: dict[str, Any]) -> bool:
    """Whether an assistant's message says nothing; thoughts alone, which no answer follows, count as nothing."""
    content = message["content"].rpartition(END_OF_THINK)[2]
    return message["role"] == "assistant" and not content.strip() and not message.get("tool_calls")
