"""What goes into a chat template: messages and tools in the form of the OpenAI API, checked field by field.

Templates are programs that trust their input. What they would fail on, or print as Python's text of an object, is told
here instead, by the name of the field.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from qwen35_jax.errors import PromptError
from qwen35_jax.inference.chat.argument_types import read_json

ROLES = ("system", "developer", "user", "assistant", "tool")
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 60


class MessageError(PromptError):
    """A message or a tool that cannot be rendered.

    Attributes:
        field: where, as in `messages[4].tool_calls[0].function.arguments`.
    """

    def __init__(self, field: str, complaint: str):
        super().__init__(f"{field} {complaint}")
        self.field = field


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates read them.

    Args:
        messages: each a mapping with `role` and `content`, the latter a text or a list of text parts. An assistant's
            may have `reasoning_content`, and `tool_calls` in place of content; arguments of a call may be a mapping or
            the JSON text of one.

    Returns:
        Copies with every content one text, and arguments of calls as mappings. The role `developer`, which the API has
        for `system` since 2024, becomes `system`.

    Raises:
        MessageError: a field is missing, of a wrong type, or not text.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise MessageError("messages", f"is {_shown(messages)}, expected a list of messages")
    return [_checked_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def checked_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools as templates read them, which is as they come.

    Args:
        tools: each `{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}`, or the
            inner mapping alone.

    Raises:
        MessageError: a tool is no such mapping, or two have one name.
    """
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise MessageError("tools", f"is {_shown(tools)}, expected a list of tools")
    names: dict[str, str] = {}
    for index, tool in enumerate(tools):
        field = f"tools[{index}]"
        _check_mapping(tool, field, "a tool")
        if tool.get("type", "function") != "function":
            raise MessageError(f"{field}.type", f"is {_shown(tool['type'])}, expected 'function'")
        function, field = _function_of(tool, field)
        name = _checked_name(function, field)
        if name in names:
            raise MessageError(f"{field}.name", f"is {name!r}, which {names[name]} is called already")
        names[name] = field
        for key, kind, expected in (("description", str, "a text"), ("parameters", Mapping, "a JSON schema")):
            value = function.get(key)
            if value is not None and not isinstance(value, kind):
                raise MessageError(f"{field}.{key}", f"is {_shown(value)}, expected {expected}")
    return [dict(tool) for tool in tools]


def tool_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The JSON schema of each tool's parameters, by the tool's name; arguments and errors as for `checked_tools`."""
    functions = [_function_of(tool, "")[0] for tool in checked_tools(tools)]
    return {function["name"]: function.get("parameters") or {} for function in functions}


def _checked_message(message: Any, field: str) -> dict[str, Any]:
    _check_mapping(message, field, "a mapping with a role and a content")
    checked = dict(message)
    role = checked.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise MessageError(f"{field}.role", f"is {_shown(role)}, expected one of {', '.join(ROLES)}")
    if role == "developer":
        checked["role"] = "system"
    content = checked.get("content")
    # An assistant that only calls tools has no content, and one that was interrupted may have none either.
    checked["content"] = "" if content is None and role == "assistant" else _text(content, f"{field}.content")
    reasoning = checked.get("reasoning_content")
    if reasoning is not None and not isinstance(reasoning, str):
        raise MessageError(f"{field}.reasoning_content", f"is {_shown(reasoning)}, expected a text")
    calls = checked.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list | tuple):
            raise MessageError(f"{field}.tool_calls", f"is {_shown(calls)}, expected a list of calls")
        checked["tool_calls"] = [
            _checked_call(call, f"{field}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    return checked


def _text(content: Any, field: str) -> str:
    """A content as one text: parts follow each other, as the family's template has it."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise MessageError(field, f"is {_shown(content)}, expected a text or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        place = f"{field}[{index}]"
        if isinstance(part, str):
            texts.append(part)
            continue
        _check_mapping(part, place, "a part such as {'type': 'text', 'text': ...}")
        kind = part.get("type")
        if kind != "text":
            raise MessageError(
                f"{place}.type",
                f"is {_shown(kind)}, and chats are text only here: leave this part out, or put it into words",
            )
        if not isinstance(part.get("text"), str):
            raise MessageError(f"{place}.text", f"is {_shown(part.get('text'))}, expected a text")
        texts.append(part["text"])
    return "".join(texts)


def _checked_call(call: Any, field: str) -> dict[str, Any]:
    _check_mapping(call, field, "a call of a function")
    function, place = _function_of(call, field)
    function = dict(function)
    name = _checked_name(function, place)
    function["arguments"] = _arguments(function.get("arguments"), f"{place}.arguments", name)
    return {**call, "function": function} if place != field else function


def _arguments(arguments: Any, field: str, name: str) -> dict[str, Any]:
    """Arguments as a mapping. None and the empty text, which clients send for a call without any, are an empty one."""
    called = f"of the call of {name!r}"
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments)
        except ValueError as error:
            raise MessageError(field, f"{called} is no JSON: {error}") from error
    if not isinstance(arguments, Mapping):
        raise MessageError(field, f"{called} is {_shown(arguments)}, expected a JSON object")
    return dict(arguments)


def _function_of(entry: Mapping[str, Any], field: str) -> tuple[Mapping[str, Any], str]:
    """The function of a tool or a call, which stands in a mapping of its own or is the entry itself."""
    if "function" not in entry:
        return entry, field
    field = f"{field}.function"
    _check_mapping(entry["function"], field, "a mapping with the function's name")
    return entry["function"], field


def _checked_name(function: Mapping[str, Any], field: str) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise MessageError(f"{field}.name", f"is {_shown(name)}, expected the name of a function")
    return name


def _check_mapping(value: Any, field: str, expected: str) -> None:
    if not isinstance(value, Mapping):
        raise MessageError(field, f"is {_shown(value)}, expected {expected}")


def _shown(value: Any) -> str:
    """A value in an error, cut short: it may be anything."""
    return "missing" if value is None else _REPR.repr(value)
