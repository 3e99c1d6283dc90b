"""One tool call in the text of an answer, read while it arrives.

The family writes calls as tagged text:

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

Its predecessor Qwen3 writes `{"name": NAME, "arguments": {...}}` between the outer tags; both are read.

Values are not escaped, so they may hold any text, tags among it. A value ends at the first `</parameter>` that is
followed, white space aside, by another `<parameter=` or `</function>`, or, where the model forgot that tag, at
`</function>` followed by `</tool_call>`. One line break after the opening tag and one before the closing tag belong to
the format.

Source: the format instructions of the family's chat template.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Generator, Mapping
from typing import Any

from qwen35_jax.inference.chat.argument_types import read_json, typed_arguments

OPENING_TAG = "<tool_call>"
CLOSING_TAG = "</tool_call>"
WHITE_SPACE = " \t\r\n"

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\n]*")
_VALUE_END = re.compile(f"{_PARAMETER_END}|{_FUNCTION_END}")
_SPACE = re.compile(f"[{WHITE_SPACE}]*")
_JSON_MARK = re.compile(r'[{}"]')
_STRING_MARK = re.compile(r'\\.|"', re.DOTALL)


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for.

    Attributes:
        name: of the function, whether it was declared or not.
        arguments: by parameter, typed by the tool's schema.
    """

    name: str
    arguments: Mapping[str, Any]

    @property
    def arguments_json(self) -> str:
        """The arguments as the OpenAI API has them: the JSON text of an object."""
        return json.dumps(self.arguments, ensure_ascii=False)


class ToolCallReader:
    """Reads one call from the pieces of a text that begins with the opening tag.

    What it decides depends on the text alone, not on how the text was cut into pieces, and is final: more text changes
    neither a call that is complete nor a text that is no call.

    Args:
        schemas: `parameters` of each declared function, by its name.

    Attributes:
        text: all that was pushed.
        position: up to where the text has been read; once a call is complete, its end.
        done: whether it is decided what the text is.
        call: the call; None while it is not complete, and for a text that is no call.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]):
        self.text = ""
        self.position = len(OPENING_TAG)
        self.done = False
        self.call: ToolCall | None = None
        self._schemas = schemas
        self._grammar = self._read_call()

    def push(self, piece: str) -> None:
        """Takes the next piece. After `done` nothing more may be pushed."""
        self.text += piece
        try:
            next(self._grammar)
        except StopIteration as end:
            self.done = True
            self.call = end.value

    # Each part of the grammar is a generator that yields when it needs more text than there is.

    def _read_call(self) -> Generator[None, None, ToolCall | None]:
        opening = yield from self._take(_FUNCTION, "{")
        if opening == "{":
            return (yield from self._read_json_call())
        name = (yield from self._take_name()) if opening else None
        if name is None:
            return None
        values = {}
        tag = yield from self._take(_PARAMETER, _FUNCTION_END)
        while tag == _PARAMETER:
            key = yield from self._take_name()
            if key is None:
                return None
            values[key], tag = yield from self._take_value()
        if tag == _FUNCTION_END:
            tag = yield from self._take(CLOSING_TAG)
        if tag is None:
            return None
        return ToolCall(name, typed_arguments(values, self._schemas.get(name, {})))

    def _take(self, *expected: str) -> Generator[None, None, str | None]:
        """Skips white space and takes the text that stands there; None if it is none of those expected."""
        longest = max(map(len, expected))
        while True:
            self.position = self._after_space()
            there = self.text[self.position : self.position + longest]
            for text in expected:
                if there.startswith(text):
                    self.position += len(text)
                    return text
            if not any(text.startswith(there) for text in expected):
                return None
            yield

    def _after_space(self) -> int:
        space = _SPACE.match(self.text, self.position)
        return space.end() if space else self.position

    def _take_name(self) -> Generator[None, None, str | None]:
        """Takes a name and the `>` after it; None if there is no name."""
        while True:
            name = _NAME.match(self.text, self.position)
            assert name is not None  # the pattern matches the empty text as well
            if name.end() < len(self.text):
                self.position = name.end() + 1
                return (name[0].strip() or None) if self.text[name.end()] == ">" else None
            yield

    def _take_value(self) -> Generator[None, None, tuple[str, str]]:
        """Takes a value and the tags after it, and returns it with the last of these."""
        start = search_from = self.position
        while True:
            end = _VALUE_END.search(self.text, search_from)
            if end is None:
                search_from = max(start, len(self.text) - len(_PARAMETER_END) + 1)
                yield
                continue
            self.position = end.end()
            forgotten = end[0] == _FUNCTION_END
            following = (CLOSING_TAG,) if forgotten else (_PARAMETER, _FUNCTION_END)
            tag = yield from self._take(*following)
            if tag is not None:
                return self.text[start : end.start()].removeprefix("\n").removesuffix("\n"), tag
            search_from = end.start() + 1

    def _read_json_call(self) -> Generator[None, None, ToolCall | None]:
        """Reads the older form, from behind its first brace."""
        start = self.position - 1
        depth = 1
        in_string = False
        while depth:
            mark = (_STRING_MARK if in_string else _JSON_MARK).search(self.text, self.position)
            if mark is None:
                # What has been looked at is not looked at again, but for a backslash whose character is still to come.
                begun = in_string and self.text.endswith("\\")
                self.position = max(self.position, len(self.text) - begun)
                yield
                continue
            self.position = mark.end()
            in_string ^= mark[0] == '"'
            depth += {"{": 1, "}": -1}.get(mark[0], 0)
        call = _json_call(self.text[start : self.position])
        if call is None or (yield from self._take(CLOSING_TAG)) is None:
            return None
        return call


def _json_call(text: str) -> ToolCall | None:
    """The call that a JSON object describes; None if it describes none."""
    try:
        content = read_json(text)
        arguments = content.get("arguments", {})
        if isinstance(arguments, str):
            arguments = read_json(arguments)
    except ValueError:
        return None
    name = content.get("name")
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(name, arguments)
