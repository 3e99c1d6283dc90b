"""A conversation of several turns: its messages, and the model's next answer to them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from qwen35_jax.errors import PromptError
from qwen35_jax.inference.chat.answer_parser import AnswerEvent, AnswerParser, ParsedAnswer, opens_thought
from qwen35_jax.inference.chat_template import ChatTemplate
from qwen35_jax.inference.generation import generate
from qwen35_jax.inference.results import GenerationResult, TokenEvent
from qwen35_jax.inference.runnable import RunnableModel
from qwen35_jax.inference.settings import GenerationSettings
from qwen35_jax.inference.speculation import Speculation
from qwen35_jax.inference.tokenizer import Tokenizer

DEFAULT_ANSWER_TOKENS = 2048
"""A chat's answer may think first, so it is given more room than a plain continuation."""


class ContextFullError(PromptError):
    """A conversation fills the model's context and leaves no room for an answer."""


class _Stopped(Exception):
    """The way out of `generate` for an answer that is not wanted any more."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """What came of one question.

    Attributes:
        answer: thoughts and content, as far as they came.
        result: tokens and timing; None for an answer that was stopped.
    """

    answer: ParsedAnswer
    result: GenerationResult | None


class Conversation:
    """Messages that are sent to a model again with every question.

    Args:
        model: from `qwen35_jax.checkpoint.load`.
        tokenizer: of the model.
        template: of the model.
        settings: for every answer. `max_new_tokens` of None means 2048; in any case an answer is given no more than
            the context leaves.
        stop_ids: see `generate`; `chat_stop_token_ids` tells those of a chat.
        speculation: see `generate`.
        enable_thinking: see `ChatTemplate.render`.
        system: the system message, if any.

    Attributes:
        messages: so far, the system message not among them.
        system: the system message; a new one counts from the next question on.
    """

    def __init__(
        self,
        model: RunnableModel,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        settings: GenerationSettings | None = None,
        stop_ids: Iterable[int] | None = None,
        speculation: Speculation | None = None,
        enable_thinking: bool | None = None,
        system: str | None = None,
    ):
        self.messages: list[dict[str, Any]] = []
        self.system = system
        self._model = model
        self._tokenizer = tokenizer
        self._template = template
        self._settings = settings or GenerationSettings()
        self._stop_ids = stop_ids
        self._speculation = speculation
        self._enable_thinking = enable_thinking

    @property
    def all_messages(self) -> list[dict[str, Any]]:
        """The messages with the system message before them."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + self.messages

    def reset(self) -> None:
        """Forgets the messages. The system message stays."""
        self.messages.clear()

    def ask(
        self,
        text: str,
        on_event: Callable[[AnswerEvent], None] = lambda event: None,
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Turn:
        """Puts a question and keeps it, with the answer, among the messages.

        An answer that is stopped, by `should_stop` or a KeyboardInterrupt, is kept as far as it came; where there is
        no content yet, the question is forgotten as well. It is also forgotten if an error is raised.

        Args:
            text: of the question.
            on_event: called with the parts of the answer as they come.
            should_stop: asked at every token.

        Raises:
            ContextFullError: no room is left for an answer.
            PromptError: the template refuses the conversation.
            NonFiniteError: see `generate`.
        """
        question = {"role": "user", "content": text}
        prompt = self._template.render([*self.all_messages, question], enable_thinking=self._enable_thinking)
        tokens = self._tokenizer.encode(prompt, add_special_tokens=False)
        parser = AnswerParser(in_thought=opens_thought(prompt))

        def take(event: TokenEvent) -> None:
            if should_stop():
                raise _Stopped
            for part in parser.push(event.text):
                on_event(part)

        result = None
        # What is interrupted is the answer's own state: the model stays as it was.
        with contextlib.suppress(KeyboardInterrupt, _Stopped):
            result = generate(
                self._model,
                [tokens],
                self._settings_for(len(tokens)),
                tokenizer=self._tokenizer,
                stop_ids=self._stop_ids,
                on_token=take,
                speculation=self._speculation,
            )
        for part in parser.end():
            on_event(part)
        answer = parser.answer
        if result is not None or answer.content:
            self.messages += [question, answer.message()]
        return Turn(answer, result)

    def _settings_for(self, prompt_length: int) -> GenerationSettings:
        context = self._model.config.text.max_context
        room = context - prompt_length
        if room <= 0:
            raise ContextFullError(
                f"the conversation would come to {prompt_length} tokens, and the model's context is {context}: "
                "start a new one, or ask something shorter"
            )
        wanted = self._settings
        return dataclasses.replace(
            wanted,
            max_new_tokens=min(wanted.max_new_tokens or DEFAULT_ANSWER_TOKENS, room),
            min_new_tokens=min(wanted.min_new_tokens, room),
        )
