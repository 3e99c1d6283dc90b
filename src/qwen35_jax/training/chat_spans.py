"""Which tokens of a chat are the assistant's, and so are learned.

The whole conversation is rendered once, since a template may write a turn otherwise when more follows it (the family's
drops the thoughts of earlier turns). In that text the assistant's spans are found, and the tokens that lie in them.

Where a span comes from. A template with `{% generation %}` tells it. Of another, the spans are its turns in the
family's format, from `<|im_start|>assistant` and a line break to the next `<|im_end|>`; their number has to be that of
the assistant's messages. No message can forge a turn: names of special tokens in messages, calls and tools are marked
before the template sees them, so that only those that the template itself writes count. What is marked is encoded as
the characters of which it consists, as the server does it. Names that the vocabulary does not call special, such as
`<think>` and `<tool_call>`, are these tokens wherever they stand, since an assistant has to learn to write them.

What of a span is trained. Exactly what the model itself writes when it is asked for this turn:

* Not what the prompt for a turn holds already. The template's prompt ends with `<think>` and a line break, or without
  thinking with a closed pair of these tags; the longest of these endings with which a turn begins is left out.
* The stop token that ends the turn is trained, also where `{% generation %}` ends before it. What follows it, as a line
  break, is not: nothing is ever drawn after a stop token.
* A token that straddles the border of a span is not trained. It holds characters that the model does not write there.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers

from qwen35_jax.errors import PromptError
from qwen35_jax.inference.chat.marks import map_texts, texts, unused_marks, without_mark
from qwen35_jax.inference.chat.messages import checked_messages, checked_tools
from qwen35_jax.inference.chat_template import ChatTemplate
from qwen35_jax.inference.stop_tokens import END_OF_TURN
from qwen35_jax.inference.tokenizer import Tokenizer
from qwen35_jax.training.document import Document

START_OF_TURN = "<|im_start|>"
ANSWER = f"{START_OF_TURN}assistant\n"

Span = tuple[int, int]
"""Begin and end in a text, in characters."""


class ChatDocuments:
    """Makes documents of conversations.

    Args:
        template: of the model.
        tokenizer: of the model.
        variables: what else the template reads, such as `preserve_thinking`; the same for all conversations.

    Raises:
        PromptError: the template has no `{% generation %}` and the tokenizer no `<|im_end|>`, or what the template's
            prompt for an answer holds cannot be told.
    """

    def __init__(
        self, template: ChatTemplate, tokenizer: Tokenizer, variables: Mapping[str, Any] | None = None
    ):
        if not template.marks_generation and tokenizer.token_id(END_OF_TURN) is None:
            raise PromptError(
                f"the tokenizer has no {END_OF_TURN}, and the chat template no {{% generation %}}: which part of a "
                "chat is the assistant's cannot be told; mark it in the template"
            )
        self._template = template
        self._tokenizer = tokenizer
        self._variables = dict(variables or {})
        self._special = {
            token.content: id
            for id, token in tokenizer.backend.get_added_tokens_decoder().items()
            if token.special and len(token.content) > 1
        }
        names = sorted({*self._special, START_OF_TURN, END_OF_TURN}, key=len, reverse=True)
        any_name = "|".join(map(re.escape, names))
        self._name = re.compile(f"({any_name})")
        self._start_of_name = re.compile(f"(?=(?:{any_name})).", re.DOTALL)
        stops = (END_OF_TURN, tokenizer.special_token("eos_token"))
        self._stops = tuple(
            stop for stop in stops if stop is not None and tokenizer.token_id(stop) is not None
        )
        self._prompts = _answer_prompts(template, self._variables)

    def encode(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Document:
        """The document of a conversation.

        Args:
            messages: see `checked_messages`.
            tools: see `checked_tools`.

        Raises:
            MessageError: a message or a tool is malformed.
            PromptError: the template refuses the conversation, or it cannot be told what in it is the assistant's.
        """
        messages = checked_messages(messages)
        tools = checked_tools(tools) if tools else None
        if not any(self._name.search(part) for part in texts([messages, tools])):
            text, spans = self._render(messages, tools)
            encoding = self._tokenizer.backend.encode(_checked_text(text), add_special_tokens=False)
            learned = [self._learned(text, span) for span in spans]
            return _document(encoding.ids, encoding.offsets, learned)
        (mark,) = unused_marks([messages, tools, self._variables], 1)
        broken = functools.partial(self._start_of_name.sub, rf"\g<0>{mark}")
        text, spans = self._render(map_texts(broken, messages), map_texts(broken, tools))
        plain = self._template.render(messages, add_generation_prompt=False, tools=tools, **self._variables)
        if without_mark(text, mark) != plain:
            raise PromptError(
                "the chat template does other things where a message holds the name of a special token, so the "
                "assistant's parts cannot be told: leave these names out of the messages"
            )
        tokens, offsets = self._encode_marked(_checked_text(text), mark)
        learned = [self._learned(text, span) for span in spans]

        def unmarked(border: int) -> int:
            return len(without_mark(text[:border], mark))

        return _document(tokens, offsets, [(unmarked(begin), unmarked(end)) for begin, end in learned])

    def _render(self, messages: Any, tools: Any) -> tuple[str, list[Span]]:
        if self._template.marks_generation:
            return self._template.render_with_spans(messages, tools=tools, **self._variables)
        text = self._template.render(messages, add_generation_prompt=False, tools=tools, **self._variables)
        return text, _answers(text, sum(message["role"] == "assistant" for message in messages))

    def _learned(self, text: str, span: Span) -> Span:
        """What the model itself writes of a span."""
        begin, end = span
        begin = max(_after_prompt(text, begin, prompt) for prompt in self._prompts)
        for stop in self._stops:
            if text.startswith(stop, end):
                return begin, end + len(stop)
            stopped = begin + len(text[begin:end].rstrip())
            if text.endswith(stop, begin, stopped):
                return begin, stopped
        return begin, max(begin, end)

    def _encode_marked(self, text: str, mark: str) -> tuple[list[int], list[Span]]:
        """Token ids, and the characters of each in the text without marks."""
        tokens: list[int] = []
        offsets: list[Span] = []
        begin = 0
        for piece in self._name.split(text):
            if piece in self._special:
                tokens.append(self._special[piece])
                offsets.append((begin, begin + len(piece)))
                begin += len(piece)
                continue
            piece = without_mark(piece, mark)
            encoding = self._literal.encode(piece, add_special_tokens=False)
            tokens += encoding.ids
            offsets += [(begin + first, begin + last) for first, last in encoding.offsets]
            begin += len(piece)
        return tokens, offsets

    @functools.cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """A copy of the tokenizer that reads names of special tokens as characters; it takes as long as reading it."""
        copy = tokenizers.Tokenizer.from_str(self._tokenizer.backend.to_str())
        copy.encode_special_tokens = True
        return copy


def _answer_prompts(template: ChatTemplate, variables: Mapping[str, Any]) -> tuple[str, ...]:
    """What the template writes to ask for an answer: with thinking, without, and by its own default."""
    question = [{"role": "user", "content": "?"}]
    prompts = []
    for thinking in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        options = {**variables, **thinking}
        before = template.render(question, add_generation_prompt=False, **options)
        asked = template.render(question, add_generation_prompt=True, **options)
        if not asked.startswith(before):
            raise PromptError(
                "the chat template writes a question otherwise when it asks for an answer, so what of an answer the "
                "model writes cannot be told: let `add_generation_prompt` add to the end alone"
            )
        prompts.append(asked.removeprefix(before))
    return tuple(dict.fromkeys(prompts))


def _after_prompt(text: str, begin: int, prompt: str) -> int:
    """Where a span goes on after the part of a prompt with which it begins; the rest has to stand before it."""
    for before in range(len(prompt), -1, -1):
        if text.endswith(prompt[:before], 0, begin) and text.startswith(prompt[before:], begin):
            return begin + len(prompt) - before
    return begin


def _answers(text: str, count: int) -> list[Span]:
    """The assistant's turns in a text in which every name of a special token was written by the template."""
    spans = []
    for opening in re.finditer(re.escape(ANSWER), text):
        end = text.find(END_OF_TURN, opening.end())
        if end < 0 or START_OF_TURN in text[opening.end() : end]:
            raise PromptError(
                f"the chat template leaves an assistant's turn without {END_OF_TURN}, so its end cannot be told: "
                "mark the assistant's parts in it with {% generation %}"
            )
        spans.append((opening.end(), end))
    if len(spans) != count:
        raise PromptError(
            f"the chat template writes {len(spans)} turns that begin with {ANSWER!r}, expected {count}, one for each "
            "message of the assistant: mark the assistant's parts in it with {% generation %}"
        )
    return spans


def _checked_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError("the text is not valid UTF-8: look at how it was read") from error
    return text


def _document(tokens: Sequence[int], offsets: Sequence[Span], spans: Sequence[Span]) -> Document:
    """A document in which a token is trained if all of its characters lie in a span."""
    begins, ends = np.asarray(offsets, np.int64).reshape(-1, 2).T
    trained = np.zeros(len(tokens), bool)
    for begin, end in spans:
        trained |= (begin <= begins) & (ends <= end) & (begins < ends)
    trained[:1] = False
    return Document(np.asarray(tokens, np.int32), trained)
