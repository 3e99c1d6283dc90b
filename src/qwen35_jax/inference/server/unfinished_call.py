"""The call that an answer was about to make when it was cut short.

The API tells it with its arguments as far as they came, which are the beginning of a JSON object. They are closed only
where the whole object was there.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from qwen35_jax.inference.chat.argument_types import typed_arguments
from qwen35_jax.inference.chat.messages import tool_schemas
from qwen35_jax.inference.chat.tool_call import OPENING_TAG
from qwen35_jax.inference.grammars.tool_calls import may_be_text
from qwen35_jax.inference.streaming import prefix_at_end

_OPENING = f"{OPENING_TAG}\n<function="
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n")
_END = "</function>"
_VALUE_END = "\n</parameter>"
# Only where another tag follows: a JSON text may hold this one.
_CLOSING_TAG = re.compile(r"\n?</parameter>(?=\s*(?:\Z|<p|</f|</?\Z))")
_STRUCTURED = ('"', "[", "{")


@dataclasses.dataclass(frozen=True)
class UnfinishedCall:
    """A call of which the end is missing.

    Attributes:
        name: of the function.
        arguments_json: what there is of the JSON text of its arguments.
    """

    name: str
    arguments_json: str


def unfinished_call(text: str, tools: Sequence[Mapping[str, Any]]) -> UnfinishedCall | None:
    """The call that a text begins.

    Args:
        text: what the grammar of tool calls lets an answer begin with, and no whole call.
        tools: that could be called.

    Returns:
        The call; None as long as it could be one of several functions.
    """
    schemas = tool_schemas(tools)
    _, _, call = text.partition(_OPENING)
    name, named, parameters = call.partition(">")
    if named and name in schemas:
        return UnfinishedCall(name, _arguments(parameters, schemas[name]))
    possible = [known for known in schemas if known.startswith(name)]
    return UnfinishedCall(possible[0], "") if len(possible) == 1 else None


def _arguments(text: str, schema: Mapping[str, Any]) -> str:
    """The beginning of the arguments' JSON, from the parameters of a call."""
    pieces = []
    place = 0
    while parameter := _PARAMETER.match(text, place):
        start, closing = parameter.end(), _CLOSING_TAG.search(text, parameter.end())
        stop = len(text) - prefix_at_end(text, _VALUE_END) if closing is None else closing.start()
        value = _value(parameter[1], text[start:stop], schema, closed=closing is not None)
        pieces.append(f"{_json(parameter[1])}: {value}")
        place = len(text) if closing is None else closing.end()
    arguments = "{" + ", ".join(pieces)
    if text[place:].lstrip().startswith(_END):
        return arguments + "}"
    return arguments if pieces else ""


def _value(name: str, text: str, schema: Mapping[str, Any], *, closed: bool) -> str:
    """The JSON of a value, or the beginning of it."""
    is_text = may_be_text(name, schema)
    if is_text and not closed:
        return _json(text)[:-1]
    typed = typed_arguments({name: text}, schema)[name]
    if is_text or not isinstance(typed, str):
        return _json(typed)
    return text if text.startswith(_STRUCTURED) else ""  # half a word says nothing


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
