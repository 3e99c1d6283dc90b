"""Calls that are cut short: what is told of them is a beginning of what would have been told of the whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from qwen35_jax.inference.chat.answer_parser import parse_answer
from qwen35_jax.inference.server.unfinished_call import UnfinishedCall, unfinished_call
from tests.inference.server.test_chat import post, streamed

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "back": {"type": "boolean"},
    "guests": {"type": "array", "items": {"type": "object"}},
    "class": {"enum": ["first", 2]},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "book", "parameters": {"properties": PROPERTIES}}},
    {"type": "function", "function": {"name": "bookings"}},
]
BOOK, OTHER = TOOLS
CITY = '<parameter=city>\nSão "P"\n</parameter>\n'
CALL = (
    f"<tool_call>\n<function=book>\n{CITY}"
    "<parameter=days>\n12\n</parameter>\n<parameter=back>\nTrue\n</parameter>\n"
    '<parameter=guests>\n[{"name": "</parameter>"}, {}]\n</parameter>\n<parameter=class>\nfirst\n</parameter>\n'
    "</function>\n</tool_call>"
)
HEAD = "<tool_call>\n<function=book>\n"


def test_wherever_a_call_is_cut_its_arguments_are_a_beginning_of_the_whole():
    (whole,) = parse_answer(CALL, TOOLS).tool_calls
    longest = ""
    for end in range(len(CALL)):
        begun = unfinished_call(CALL[:end], [BOOK])
        assert begun is not None and begun.name == "book"
        assert whole.arguments_json.startswith(begun.arguments_json), CALL[:end]
        if len(begun.arguments_json) > len(longest):
            longest = begun.arguments_json
    assert json.loads(longest) == whole.arguments


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("", None),
        ("<tool_ca", None),
        ("<tool_call>\n<function=book", None),
        ("<tool_call>\n<function=booki", UnfinishedCall("bookings", "")),
        (HEAD, UnfinishedCall("book", "")),
        (HEAD + "<parameter=ci", UnfinishedCall("book", "")),
        (HEAD + "<parameter=city>\n", UnfinishedCall("book", '{"city": "')),
        (HEAD + "<parameter=city>\nSão", UnfinishedCall("book", '{"city": "São')),
        (HEAD + '<parameter=city>\nSão "P"\n</par', UnfinishedCall("book", r'{"city": "São \"P\"')),
        (HEAD + CITY + "<para", UnfinishedCall("book", r'{"city": "São \"P\""')),
        (HEAD + "<parameter=days>\n1", UnfinishedCall("book", '{"days": 1')),
        (HEAD + "<parameter=back>\nTru", UnfinishedCall("book", '{"back": ')),
        (HEAD + '<parameter=guests>\n[{"a": ', UnfinishedCall("book", '{"guests": [{"a": ')),
        (HEAD + CITY + "</function>\n</tool", UnfinishedCall("book", r'{"city": "São \"P\""}')),
    ],
)
def test_what_there_is_of_a_call_is_told(text, call):
    assert unfinished_call(text, TOOLS) == call


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cut", [{"max_tokens": 24}, {"stop": "aul"}], ids=["by its length", "by a stop"])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "book"}}], ids=["required", "named"]
)
def test_a_required_call_that_is_cut_short_is_no_text(client, engine, stream, cut, choice):
    engine.answer = HEAD + "<parameter=city>\nSão Paulo" + " and further" * 20
    fields = {"tools": TOOLS, "tool_choice": choice, **cut}
    told = streamed(client, **fields) if stream else post(client, **fields)["choices"][0]
    (call,) = told["message"]["tool_calls"]
    assert call["function"]["name"] == "book"
    assert call["function"]["arguments"].startswith('{"city": "S')
    assert not call["function"]["arguments"].endswith(('"', "}"))
    assert not told["message"]["content"]
    assert told["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_calls_before_the_one_that_is_cut_short_are_whole(client, engine, served, stream):
    engine.answer = f"{CALL}\n{HEAD}<parameter=days>\n1"
    length = len(served.tokenizer.encode(engine.answer))
    fields = {"tools": TOOLS, "tool_choice": "required", "max_tokens": length}
    told = streamed(client, **fields) if stream else post(client, **fields)["choices"][0]
    first, second = (call["function"]["arguments"] for call in told["message"]["tool_calls"])
    assert json.loads(first)["days"] == 12 and second == '{"days": 1'
    assert told["finish_reason"] == "length"


def test_a_required_call_of_which_nothing_can_be_told_leaves_no_text(client, engine):
    engine.answer = "<tool_call>\n<function=book"
    told = post(client, tools=TOOLS, tool_choice="required", max_tokens=2)["choices"][0]
    assert (told["message"]["content"], told["finish_reason"]) == ("", "length")
    assert "tool_calls" not in told["message"]


def test_thoughts_that_are_cut_short_before_a_required_call_are_thoughts(client, engine):
    engine.answer = "I think of <tool_call>\n<function=book"
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    told = post(client, tools=TOOLS, tool_choice="required", max_tokens=3, **thinking)["choices"][0]
    assert told["message"]["reasoning_content"].startswith("I think")
    assert (told["message"]["content"], told["finish_reason"]) == ("", "length")
