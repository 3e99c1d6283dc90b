"""Which tools an answer may or must call, from the fields of a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from qwen35_jax.inference.chat.messages import checked_tools, tool_schemas
from qwen35_jax.inference.server.api_error import field_error, shown
from qwen35_jax.inference.server.fields import Fields
from qwen35_jax.inference.server.nested_fields import check_tool_fields
from qwen35_jax.inference.server.strict_schema import refuse_open_schema

MOST_TOOLS = 128


@dataclasses.dataclass(frozen=True)
class ToolChoice:
    """Which tools an answer may or must call.

    Attributes:
        mode: of calls, `none`, `auto` or `required`.
        tools: that may be called. The model is told of no others, and of none with `none`.
        parallel: whether several calls may be made.
        places: by the name of each tool, the field that its function stands in.
    """

    mode: Literal["none", "auto", "required"]
    tools: tuple[Mapping[str, Any], ...]
    parallel: bool
    places: Mapping[str, str]


def read_tool_choice(fields: Fields) -> ToolChoice:
    """`tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        ApiError: a field cannot be taken.
        MessageError: a tool is malformed.
    """
    given = fields.items("tools") or []
    check_tool_fields(given)
    tools = checked_tools(given)
    if len(tools) > MOST_TOOLS:
        raise field_error("tools", f"holds {len(tools)} tools, expected at most {MOST_TOOLS}")
    places = {
        name: f"tools[{index}]" + (".function" if "function" in tool else "")
        for index, tool in enumerate(tools)
        for name in tool_schemas([tool])
    }
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("strict") is True:
            place = f"{places[function['name']]}.parameters"
            refuse_open_schema(function.get("parameters") or {}, place)
    parallel = fields.boolean("parallel_tool_calls", True)
    value = fields.value("tool_choice")
    if isinstance(value, dict):
        # Naming one tool is the same as declaring no other and requiring a call.
        name = _chosen_name(value)
        chosen = tuple(tool for tool in tools if name in tool_schemas([tool]))
        if not chosen:
            raise field_error("tool_choice", f"names {shown(name)}, which is none of the tools")
        return ToolChoice("required", chosen, parallel, places)
    if value == "none":
        return ToolChoice("none", (), parallel, places)
    if value == "required":
        if not tools:
            raise field_error("tool_choice", "is 'required', and there are no tools")
        return ToolChoice("required", tuple(tools), parallel, places)
    if value not in (None, "auto"):
        raise field_error("tool_choice", f"is {shown(value)}, expected none, auto, required or a function")
    return ToolChoice("auto", tuple(tools), parallel, places)


def _chosen_name(choice: dict[str, Any]) -> str:
    fields = Fields(choice, "tool_choice")
    if fields.choice("type", ("function",)) is None:
        raise field_error("tool_choice.type", "is missing, expected function")
    function = fields.inner("function")
    name = None if function is None else function.text("name")
    if function is None or name is None:
        raise field_error("tool_choice.function", "is missing or has no name")
    function.refuse_unread()
    fields.refuse_unread()
    return name
