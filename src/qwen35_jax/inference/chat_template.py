"""Rendering a conversation with the checkpoint's own chat template.

Templates are programs that come with the weights, so they run in Jinja's sandbox, with the filters and
functions that `transformers` gives them and nothing else.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from qwen35_jax.errors import PromptError
from qwen35_jax.inference.chat.marks import unused_marks
from qwen35_jax.inference.chat.messages import checked_messages, checked_tools
from qwen35_jax.inference.tokenizer import CONFIG_FILE_NAME, Tokenizer, read_json_object

FILE_NAME = "chat_template.jinja"
# Variables of the template whose values stand before and after the assistant's parts; nothing where they are not given.
GENERATION_BEGINS = "_generation_begins"
GENERATION_ENDS = "_generation_ends"


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the template's text.
        special_tokens: variables such as `eos_token` that templates may print.

    Attributes:
        marks_generation: whether the template tells the assistant's parts by `{% generation %}`.

    Raises:
        PromptError: the source is no valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        self._special_tokens = dict(special_tokens or {})
        environment = _environment()
        try:
            program = environment.parse(source)
            self._template = environment.from_string(program)
        except jinja2.TemplateError as error:
            raise PromptError(f"the chat template is not valid: {error}") from error
        self.marks_generation = any(name.name == GENERATION_BEGINS for name in program.find_all(nodes.Name))

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> ChatTemplate:
        """Reads `chat_template.jinja`, or else `chat_template` of `tokenizer_config.json`.

        Raises:
            PromptError: neither is there, the file is not UTF-8 text, or the template is not valid.
        """
        config = read_json_object(Path(folder) / CONFIG_FILE_NAME)
        path = Path(folder) / FILE_NAME
        source = _read_text(path) if path.is_file() else config.get("chat_template")
        if isinstance(source, list):  # several named templates: [{"name": "default", "template": "..."}]
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        if not isinstance(source, str):
            raise PromptError(
                f"{folder} has neither {FILE_NAME} nor a chat_template in {CONFIG_FILE_NAME}: "
                "give a plain prompt instead of a chat"
            )
        roles = ("bos_token", "eos_token", "pad_token", "unk_token")
        return cls(source, {role: text for role in roles if (text := _token_text(config.get(role)))})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as the text that the model continues.

        Args:
            messages: see `qwen35_jax.inference.chat.messages.checked_messages`.
            add_generation_prompt: end with the opening of the assistant's turn.
            enable_thinking: passed to the template; None leaves the template's own default.
            tools: functions that the model may call, see `qwen35_jax.inference.chat.messages.checked_tools`.
            **variables: anything else that the template reads.

        Raises:
            MessageError: a message or a tool is malformed; names the field.
            PromptError: the template refuses the conversation.
        """
        messages = checked_messages(messages)
        tools = checked_tools(tools) if tools else None
        if enable_thinking is not None:
            variables["enable_thinking"] = enable_thinking
        try:
            return self._template.render(
                **self._special_tokens,
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except jinja2.TemplateError as error:
            raise PromptError(f"the chat template refuses this conversation: {error}") from error
        except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise PromptError(f"the chat template fails on this conversation: {error}") from error

    def render_with_spans(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> tuple[str, list[tuple[int, int]]]:
        """A whole conversation, and where in it the template writes inside `{% generation %}`.

        Args:
            messages: see `render`.
            tools: see `render`.
            **variables: anything else that the template reads.

        Returns:
            The text without an opening for one more answer, and the begin and end of each such part in it, in order.

        Raises:
            MessageError: a message or a tool is malformed; names the field.
            PromptError: the template refuses the conversation, or does more with what the blocks write than print it.
        """
        begin, end = unused_marks([messages, tools, variables], 2)
        plain = self.render(messages, add_generation_prompt=False, tools=tools, **variables)
        variables |= {GENERATION_BEGINS: begin, GENERATION_ENDS: end}
        marked = self.render(messages, add_generation_prompt=False, tools=tools, **variables)
        pieces = re.split(f"([{begin}{end}])", marked)
        found = pieces[1::2]
        text = "".join(pieces[::2])
        if found != [begin, end] * (len(found) // 2) or text != plain:
            raise PromptError(
                "the chat template nests {% generation %} blocks or changes what they have written, so where the "
                "assistant's parts end up cannot be told: put the blocks around what is printed as it stands"
            )
        borders = list(itertools.accumulate(map(len, pieces[::2])))
        return text, list(zip(borders[:-1:2], borders[1::2], strict=True))


def encode_chat(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Any
) -> list[int]:
    """Token ids of a rendered conversation; `options` are those of `ChatTemplate.render`."""
    return tokenizer.encode(template.render(messages, **options), add_special_tokens=False)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{path} is not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x}): save it as UTF-8"
        ) from error


def _token_text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


class _GenerationBlocks(Extension):
    """Reads `{% generation %}`, by which training templates mark the assistant's part.

    The block writes its content, between two variables that are empty in an ordinary rendering.
    """

    tags = {"generation"}  # noqa: RUF012 - the name and kind that jinja2 reads

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        content = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [_printed(GENERATION_BEGINS, line), *content, _printed(GENERATION_ENDS, line)]


def _printed(variable: str, line: int) -> nodes.Node:
    return nodes.Output([nodes.Name(variable, "load")], lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlocks]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes `<`, `>` and `&` for HTML, which would change what the model reads."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
