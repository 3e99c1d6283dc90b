"""The fields of messages and tools: each of its type, and none that nobody reads.

What they mean is looked at by `chat.messages`; a template, which takes them then, would pass over a field that it does
not know. An answer of this server or of the API may be sent back as it came, whatever client wrote it down: fields of
answers that say nothing here may be there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from qwen35_jax.inference.chat.messages import ROLES
from qwen35_jax.inference.server.api_error import field_error, shown
from qwen35_jax.inference.server.fields import Fields

_FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

_IN_MESSAGES = ("name", "tool_call_id", "annotations", "parsed")
_IN_PARTS = ("cache_control", "prompt_cache_breakpoint")
_IN_CALLS = ("index",)
_IN_CALLED_FUNCTIONS = ("parsed_arguments",)
_IN_TOOLS = ("cache_control",)
_REFUSED = {
    "audio": "is speech, and chats are text only here: put it into words",
    "function_call": "is the API's old form: use tool_calls",
    "refusal": "is not shown to these models: put it into content",
}
_NOT_OF_AN_ASSISTANT = {
    "tool_calls": "is for messages of the assistant",
    "reasoning_content": "is for messages of the assistant",
}
_KINDS = {"type": "is no kind of message that is known here: leave it out"}


def check_message_fields(messages: Sequence[Any]) -> None:
    """Refuses messages with fields of a wrong type or a wrong name; what may be in them is not looked at.

    Raises:
        ApiError: names the field.
    """
    for index, message in enumerate(messages):
        fields = _object(message, f"messages[{index}]", "an object with a role and a content")
        role = fields.choice("role", ROLES)
        content = fields.value("content")
        if not (content is None or isinstance(content, str | list)):
            raise field_error(
                fields.name("content"), f"is {shown(content)}, expected a string or a list of text parts"
            )
        for place, part in _entries(content, fields.name("content")):
            if not isinstance(part, str):
                _check_part(_object(part, place, "a string or an object with a type and a text"))
        if role == "assistant":
            fields.text("reasoning_content")
            for place, call in _entries(fields.items("tool_calls"), fields.name("tool_calls")):
                _check_call(_object(call, place, "an object with a function"))
        fields.refuse(_REFUSED, harmless=("",))
        fields.refuse(_KINDS, harmless=("text", "message"))  # that some clients write into every message
        fields.refuse({} if role == "assistant" else _NOT_OF_AN_ASSISTANT, harmless=("", []))
        fields.refuse_unread(ignored=_IN_MESSAGES)


def check_tool_fields(tools: Sequence[Any]) -> None:
    """The same for tools."""
    for index, tool in enumerate(tools):
        fields = _object(tool, f"tools[{index}]", "an object with a type and a function")
        fields.choice("type", ("function",))
        inner = fields.inner("function")
        function = fields if inner is None else inner
        _check_function_name(function)
        function.text("description")
        parameters = function.inner("parameters")
        if parameters is not None:
            parameters.choice("type", ("object",))
        function.boolean("strict")
        fields.refuse_unread(ignored=_IN_TOOLS)
        function.refuse_unread(ignored=_IN_TOOLS)


def _check_function_name(function: Fields) -> None:
    name = function.text("name")
    if name is not None and not _FUNCTION_NAME.fullmatch(name):
        raise field_error(
            function.name("name"),
            f"is {shown(name)}, expected 1 to 64 letters, digits, underscores and hyphens",
        )


def _check_part(part: Fields) -> None:
    if part.text("type") == "text":  # others are not taken, whatever is in them
        part.text("text")
        part.refuse_unread(ignored=_IN_PARTS)


def _check_call(call: Fields) -> None:
    call.text("id")
    call.choice("type", ("function",))
    inner = call.inner("function")
    function = call if inner is None else inner
    function.text("name")
    arguments = function.value("arguments")
    if not (arguments is None or isinstance(arguments, str | dict)):
        raise field_error(
            function.name("arguments"), f"is {shown(arguments)}, expected the JSON text of an object"
        )
    call.refuse_unread(ignored=_IN_CALLS)
    function.refuse_unread(ignored=(*_IN_CALLS, *_IN_CALLED_FUNCTIONS))


def _object(value: Any, place: str, expected: str) -> Fields:
    if not isinstance(value, Mapping):
        raise field_error(place, f"is {shown(value)}, expected {expected}", code="invalid_type")
    return Fields(value, place)


def _entries(values: Any, place: str) -> list[tuple[str, Any]]:
    return [
        (f"{place}[{index}]", value) for index, value in enumerate(values if isinstance(values, list) else [])
    ]
