"""A conversation of several turns: its messages, and the model's next answer to them."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

from qwen35_jax.errors import PromptError
from qwen35_jax.inference.chat.answer_parser import AnswerEvent, AnswerParser, ParsedAnswer, opens_thought
from qwen35_jax.inference.chat_template import ChatTemplate
from qwen35_jax.inference.engine import AnswerStream, Engine, Request
from qwen35_jax.inference.results import GenerationResult, Timing
from qwen35_jax.inference.settings import GenerationSettings
from qwen35_jax.inference.tokenizer import Tokenizer

DEFAULT_ANSWER_TOKENS = 2048
"""A chat's answer may think first, so it is given more room than a plain continuation."""


class ContextFullError(PromptError):
    """A conversation fills its engine's context and leaves no room for an answer."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """What came of one question.

    Attributes:
        answer: thoughts and content, as far as they came.
        result: tokens and timing, where tokens of the prompt that the engine remembered are not counted as prefill;
            None for an answer that was stopped.
    """

    answer: ParsedAnswer
    result: GenerationResult | None


class Conversation:
    """Messages that are sent to an engine again with every question.

    The engine remembers the beginning that a question shares with those before it, so that only the rest is consumed.

    Args:
        engine: with the model; one slot is enough.
        tokenizer: of the model.
        template: of the model.
        settings: for every answer. `max_new_tokens` of None means 2048; in any case an answer is given no more than
            the context leaves.
        stop_ids: ids that end an answer; `chat_stop_token_ids` tells those of a chat.
        enable_thinking: see `ChatTemplate.render`.
        system: the system message, if any.

    Attributes:
        messages: so far, the system message not among them.
        system: the system message; a new one counts from the next question on.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        stop_ids: Iterable[int],
        settings: GenerationSettings | None = None,
        enable_thinking: bool | None = None,
        system: str | None = None,
    ):
        self.messages: list[dict[str, Any]] = []
        self.system = system
        self._engine = engine
        self._tokenizer = tokenizer
        self._template = template
        self._settings = settings or GenerationSettings()
        self._stop_ids = tuple(stop_ids)
        self._enable_thinking = enable_thinking
        self._stream: AnswerStream | None = None
        self._stopped = False

    @property
    def all_messages(self) -> list[dict[str, Any]]:
        """The messages with the system message before them."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + self.messages

    def reset(self) -> None:
        """Forgets the messages. The system message stays."""
        self.messages.clear()

    def ask(self, text: str, on_event: Callable[[AnswerEvent], None] = lambda event: None) -> Turn:
        """Puts a question and keeps it, with the answer, among the messages.

        An answer that is stopped, by `stop` or a KeyboardInterrupt, is kept as far as it came; where there is no
        content yet, the question is forgotten as well. It is also forgotten if an error is raised.

        Args:
            text: of the question.
            on_event: called with the parts of the answer as they come.

        Raises:
            ContextFullError: no room is left for an answer.
            PromptError: the template refuses the conversation.
            NonFiniteError: see `generate`.
        """
        self._stopped = False
        question = {"role": "user", "content": text}
        prompt = self._template.render([*self.all_messages, question], enable_thinking=self._enable_thinking)
        tokens = self._tokenizer.encode(prompt, add_special_tokens=False)
        request = Request(tuple(tokens), self._settings_for(len(tokens)), self._stop_ids)
        parser = AnswerParser(in_thought=opens_thought(prompt))

        def take(text: str) -> None:
            for part in parser.push(text):
                on_event(part)

        result = None
        with contextlib.suppress(KeyboardInterrupt):
            result = self._answer(request, take)
        for part in parser.end():
            on_event(part)
        answer = parser.answer
        if result is not None or answer.content:
            self.messages += [question, answer.message()]
        return Turn(answer, result)

    def stop(self) -> None:
        """Ends the answer that is being drawn. For other threads and signal handlers, while `ask` runs."""
        self._stopped = True
        if self._stream is not None:
            self._stream.cancel()

    def _answer(self, request: Request, take: Callable[[str], None]) -> GenerationResult | None:
        """Passes the text of an answer on as it comes; None where it was stopped."""
        start, compiled = time.perf_counter(), self._engine.compile_seconds
        arrivals: list[float] = []
        # Told by the engine's thread: whoever reads the stream may see the first token and the last at once.
        with self._engine.submit(request, notify=lambda: arrivals.append(time.perf_counter())) as stream:
            self._stream = stream
            for event in stream:
                if self._stopped:
                    return None
                take(event.text)
        generation = stream.result()
        compiling = self._engine.compile_seconds - compiled
        timing = Timing(
            compile_seconds=compiling,
            prefill_tokens=len(generation.prompt_tokens) - generation.cached_tokens,
            prefill_seconds=arrivals[0] - start - compiling,
            decode_tokens=len(generation.tokens) - 1,
            decode_seconds=arrivals[-1] - arrivals[0],
        )
        return GenerationResult((generation,), timing)

    def _settings_for(self, prompt_length: int) -> GenerationSettings:
        context = self._engine.memory.context
        room = context - prompt_length
        if room <= 0:
            raise ContextFullError(
                f"the conversation would come to {prompt_length} tokens, and its context is {context}: "
                "start a new one, or ask something shorter"
            )
        wanted = self._settings
        return dataclasses.replace(
            wanted,
            max_new_tokens=min(wanted.max_new_tokens or DEFAULT_ANSWER_TOKENS, room),
            min_new_tokens=min(wanted.min_new_tokens, room),
        )
