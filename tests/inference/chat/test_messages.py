"""Messages and tools are refused by the name of the field, and otherwise come through in one form."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from qwen35_jax.errors import PromptError
from qwen35_jax.inference.chat.messages import MessageError, checked_messages, checked_tools, tool_schemas

USER = {"role": "user", "content": "Hi"}


def calling(**function: Any) -> list[Any]:
    call = {"id": "call_1", "type": "function", "function": function}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]


ARGUMENTS = "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("messages", "field", "complaint"),
    [
        ("Hi", "messages", "is 'Hi', expected a list of messages"),
        (None, "messages", "is missing"),
        (["Hi"], "messages[0]", "is 'Hi', expected a mapping with a role and a content"),
        ([USER, {"content": "Hi"}], "messages[1].role", "is missing, expected one of system, "),
        ([{"role": "robot", "content": "Hi"}], "messages[0].role", "is 'robot', expected one of system, "),
        ([{"role": ["user"], "content": "Hi"}], "messages[0].role", r"is ['user'], expected one of"),
        ([{"role": "user"}], "messages[0].content", "is missing, expected a text or a list of text parts"),
        ([{"role": "tool", "content": 20}], "messages[0].content", "is 20, expected a text"),
        ([{"role": "user", "content": [7]}], "messages[0].content[0]", "is 7, expected a part"),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}],
                }
            ],
            "messages[0].content[1].type",
            "is 'image_url', and chats are text only here: leave this part out",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "is missing"),
        (
            [USER, {"role": "assistant", "content": "", "reasoning_content": 3}],
            "messages[1].reasoning_content",
            "is 3, expected a text",
        ),
        (
            [USER, {"role": "assistant", "tool_calls": {"name": "f"}}],
            "messages[1].tool_calls",
            "is {'name': 'f'}, expected a list of calls",
        ),
        ([USER, {"role": "assistant", "tool_calls": ["f"]}], "messages[1].tool_calls[0]", "is 'f', expected"),
        (calling(arguments="{}"), "messages[1].tool_calls[0].function.name", "is missing, expected the name"),
        (calling(name="f", arguments='{"a": '), ARGUMENTS, "of the call of 'f' is no JSON: "),
        (calling(name="f", arguments='{"a": NaN}'), ARGUMENTS, "of the call of 'f' is no JSON: NaN"),
        (calling(name="f", arguments="[" * 100_000), ARGUMENTS, "of the call of 'f' is no JSON: "),
        (calling(name="f", arguments="[1]"), ARGUMENTS, "of the call of 'f' is [1], expected a JSON object"),
        (calling(name="f", arguments=[1]), ARGUMENTS, "of the call of 'f' is [1], expected a JSON object"),
        (calling(name="f", arguments=3), ARGUMENTS, "of the call of 'f' is 3, expected a JSON object"),
        (calling(name="f", arguments="3"), ARGUMENTS, "of the call of 'f' is 3, expected a JSON object"),
        (calling(name="f", arguments='"a"'), ARGUMENTS, "of the call of 'f' is 'a', expected a JSON object"),
        (calling(name="f", arguments="null"), ARGUMENTS, "of the call of 'f' is missing, expected"),
    ],
)
def test_b87_a_malformed_message_is_refused_by_its_field(messages: Any, field: str, complaint: str) -> None:
    with pytest.raises(MessageError) as refusal:
        checked_messages(messages)
    assert isinstance(refusal.value, PromptError)
    assert refusal.value.field == field
    assert str(refusal.value).startswith(f"{field} {complaint}")
    assert len(str(refusal.value)) < 250


@pytest.mark.parametrize("arguments", [None, "", " ", "{}", {}])
def test_b87_a_call_without_arguments_has_an_empty_mapping(arguments: Any) -> None:
    (_, message) = checked_messages(calling(name="f", arguments=arguments))
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert message["tool_calls"][0]["id"] == "call_1"


def test_b87_a_call_may_leave_the_outer_mapping_out() -> None:
    call = {"name": "f", "arguments": '{"a": 1}'}
    (_, message) = checked_messages([USER, {"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"] == [{"name": "f", "arguments": {"a": 1}}]


def test_contents_become_one_text_and_nothing_else_changes() -> None:
    parts = [{"type": "text", "text": "one "}, "two"]
    messages = [
        {"role": "developer", "content": parts},
        {"role": "user", "content": "", "name": "Ada"},
        {"role": "assistant"},
        {"role": "tool", "content": parts, "tool_call_id": "call_1"},
    ]
    before = copy.deepcopy(messages)
    assert checked_messages(messages) == [
        {"role": "system", "content": "one two"},
        {"role": "user", "content": "", "name": "Ada"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "one two", "tool_call_id": "call_1"},
    ]
    assert messages == before


@pytest.mark.parametrize(
    ("tools", "field", "complaint"),
    [
        ({"type": "function"}, "tools", "expected a list of tools"),
        ([3], "tools[0]", "is 3, expected a tool"),
        ([{"type": "retrieval"}], "tools[0].type", "is 'retrieval', expected 'function'"),
        ([{"type": "function", "function": None}], "tools[0].function", "is missing, expected a mapping"),
        (
            [{"type": "function", "function": {"name": 3}}],
            "tools[0].function.name",
            "is 3, expected the name",
        ),
        ([{"name": "f"}, {"function": {"name": "f"}}], "tools[1].function.name", "is 'f', which tools[0]"),
        ([{"name": "f", "parameters": [1]}], "tools[0].parameters", "is [1], expected a JSON schema"),
        ([{"name": "f", "description": 1}], "tools[0].description", "is 1, expected a text"),
    ],
)
def test_a_malformed_tool_is_refused_by_its_field(tools: Any, field: str, complaint: str) -> None:
    with pytest.raises(MessageError) as refusal:
        checked_tools(tools)
    assert refusal.value.field == field
    assert complaint in str(refusal.value)


def test_tools_come_through_as_they_are_and_tell_their_schemas() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}},
        {"name": "g", "parameters": None},
    ]
    assert checked_tools(tools) == tools
    assert tool_schemas(tools) == {"f": schema, "g": {}}
