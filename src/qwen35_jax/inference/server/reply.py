"""A reply while its choices grow: as one object at the end, or as a stream of them."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence

from qwen35_jax.inference.results import Generation, TokenEvent
from qwen35_jax.inference.server.answer_feed import AnswerFeed
from qwen35_jax.inference.server.api_error import unavailable
from qwen35_jax.inference.server.choice import JSON, Choice, usage
from qwen35_jax.inference.server.sampling_fields import Delivery

PATIENCE = 15.0
"""Seconds of silence in a stream, after which a sign of life is sent: proxies close connections that seem idle."""


@dataclasses.dataclass(frozen=True)
class ReplyForm:
    """What the API calls a reply.

    Attributes:
        id_prefix: that its id begins with.
        whole: `object` of all of it.
        piece: `object` of a piece of a stream.
    """

    id_prefix: str
    whole: str
    piece: str


CHAT = ReplyForm("chatcmpl", "chat.completion", "chat.completion.chunk")
COMPLETION = ReplyForm("cmpl", "text_completion", "text_completion")


class Reply:
    """The reply to one request.

    Args:
        form: what the API calls it.
        model: name of the model.
        choices: of the reply.
        delivery: how the client wants it.
        feed: with one answer for each choice.
        on_token: called with every token that comes.
    """

    def __init__(
        self,
        form: ReplyForm,
        model: str,
        choices: Sequence[Choice],
        delivery: Delivery,
        feed: AnswerFeed,
        on_token: Callable[[], None],
    ):
        self._form = form
        self._head = {
            "id": f"{form.id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self._choices = choices
        self._delivery = delivery
        self._feed = feed
        self._on_token = on_token
        self._generations: dict[int, Generation] = {}

    @property
    def is_stream(self) -> bool:
        return self._delivery.stream

    @property
    def usage(self) -> JSON:
        """Of the whole reply, once all choices have ended."""
        generations = [self._generations[index] for index in range(len(self._choices))]
        return usage(self._choices, generations, self._delivery.choices)

    async def whole(self) -> JSON:
        """The reply once all of it is there."""
        async for _ in self._batches():
            pass
        choices = [choice.whole() for choice in self._choices]
        return self._head | {"object": self._form.whole, "choices": choices, "usage": self.usage}

    async def pieces(self) -> AsyncIterator[JSON | None]:
        """The reply in the pieces of a stream; None where there has been nothing to tell for a while."""
        for choice in self._choices:
            for piece in choice.opening():
                yield self._piece([piece])
        async for touched in self._batches():
            for index in touched:
                for piece in self._choices[index].released():
                    yield self._piece([piece])
            if not touched:
                yield None
        if self._delivery.include_usage:
            yield self._piece([]) | {"usage": self.usage}

    async def _batches(self) -> AsyncIterator[list[int]]:
        """Hands what comes to the choices, and tells which of them it was for."""
        async for events in self._feed.events(PATIENCE):
            for index, event in events:
                self._hand(index, event)
            yield sorted({index for index, _ in events})

    def _hand(self, index: int, event: TokenEvent | Generation) -> None:
        choice = self._choices[index]
        if isinstance(event, Generation):
            if event.finish_reason == "cancelled" and not choice.satisfied:
                raise unavailable("the server is shutting down and has ended this request")
            self._generations[index] = event
            choice.end(event.finish_reason)
            return
        self._on_token()
        choice.take(event)
        if choice.satisfied:
            self._feed.cancel(index)

    def _piece(self, choices: list[JSON]) -> JSON:
        piece = self._head | {"object": self._form.piece, "choices": choices}
        return piece | {"usage": None} if self._delivery.include_usage else piece
