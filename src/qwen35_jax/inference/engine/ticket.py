"""A request on its way through an engine."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Sequence

from qwen35_jax.errors import PromptError
from qwen35_jax.inference.answer import Answer
from qwen35_jax.inference.buckets import Chunk
from qwen35_jax.inference.engine.request import AnswerStream, Request
from qwen35_jax.inference.prompts import check_prompt
from qwen35_jax.inference.rows import STOP_ID_SLOTS
from qwen35_jax.inference.tokenizer import Tokenizer


@dataclasses.dataclass
class Ticket:
    """What belongs to one request.

    Attributes:
        request: with its settings filled in.
        stream: that its client reads.
        answer: what has been drawn so far.
        chunks: pieces of its prompt that have to be consumed; known when it gets a slot.
    """

    request: Request
    stream: AnswerStream
    answer: Answer
    chunks: Sequence[Chunk] = ()

    @property
    def cancelled(self) -> bool:
        return self.stream.cancelled

    def number(self, number: int) -> None:
        """Gives the request its number."""
        self.stream.number = self.answer.row = number


def ticket_for(
    request: Request,
    *,
    vocab_size: int,
    context: int,
    tokenizer: Tokenizer | None,
    wake: Callable[[], None],
    notify: Callable[[], None],
) -> Ticket:
    """Checks a request and makes its ticket.

    Args:
        request: as its client wrote it.
        vocab_size: of the model.
        context: tokens of a slot.
        tokenizer: of the model.
        wake: see `AnswerStream`.
        notify: see `Engine.submit`.

    Raises:
        PromptError: it cannot be run.
    """
    prompt, settings = check_prompt(
        "the prompt",
        request.prompt,
        request.settings,
        vocab_size=vocab_size,
        context=context,
        whose="this engine's context",
        tokenizer=tokenizer,
    )
    if settings.stop and tokenizer is None:
        raise PromptError("stop strings need a tokenizer, and this engine was made without one")
    if len(request.stop_ids) > STOP_ID_SLOTS:
        raise PromptError(f"{len(request.stop_ids)} stop ids, expected at most {STOP_ID_SLOTS}")
    stop_ids = () if settings.ignore_eos else request.stop_ids
    stream = AnswerStream(-1, wake, notify)
    answer = Answer(
        prompt,
        settings,
        seed=secrets.randbits(32) if settings.seed is None else settings.seed,
        tokenizer=tokenizer,
        stop_ids=stop_ids,
        listener=stream.put,
        row=-1,
    )
    return Ticket(Request(tuple(prompt), settings, stop_ids, request.constraint), stream, answer)
