"""The parts of an answer: the same however it is cut into pieces, and by the rules that the parser's file states."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_jax.errors import PromptError
from qwen35_jax.inference.chat.answer_parser import (
    AnswerParser,
    Content,
    ParsedAnswer,
    Reasoning,
    opens_thought,
    parse_answer,
)
from qwen35_jax.inference.chat.tool_call import ToolCall
from qwen35_jax.inference.chat_template import ChatTemplate

WRITE = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "lines": {"type": "integer"},
                "force": {"type": "boolean"},
                "ratio": {"type": "number"},
                "options": {"type": "object"},
                "tags": {"type": "array"},
                "note": {},
            },
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WRITE, NOW]

NOW_CALL = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
WRITE_CALL = (
    "<tool_call>\n<function=write>\n<parameter=text>\nif a < b:\n    print(\"x\", 'é 日本 🙂')\n</b></parameter >\n\n"
    "</parameter>\n<parameter=lines>\n12\n</parameter>\n<parameter=force>\nTrue\n</parameter>\n"
    '<parameter=options>\n{"a": [1, {"b": "</parameter>"}]}\n</parameter>\n<parameter=note>\n\n</parameter>\n'
    "</function>\n</tool_call>"
)
WRITE_ARGUMENTS = {
    "text": "if a < b:\n    print(\"x\", 'é 日本 🙂')\n</b></parameter >\n",
    "lines": 12,
    "force": True,
    "options": {"a": [1, {"b": "</parameter>"}]},
    "note": "",
}
CALLS = (ToolCall("write", WRITE_ARGUMENTS), ToolCall("now", {}))


def streamed(pieces: Any, tools: Any = TOOLS, *, in_thought: bool = False) -> ParsedAnswer:
    """What the events of a streamed answer add up to, which the parser's own sum has to agree with."""
    parser = AnswerParser(tools, in_thought=in_thought)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.end()
    assert all(event.text for event in events if not isinstance(event, ToolCall))
    answer = ParsedAnswer(
        "".join(event.text for event in events if isinstance(event, Reasoning)),
        "".join(event.text for event in events if isinstance(event, Content)),
        tuple(event for event in events if isinstance(event, ToolCall)),
    )
    assert parser.answer == answer
    return answer


ANSWERS = {
    "content": ("Hello, <b>you</b>.\n", False, ParsedAnswer("", "Hello, <b>you</b>.\n")),
    "thought": ("I think\n\nso.\n</think>\n\nYes.", True, ParsedAnswer("I think\n\nso.", "Yes.")),
    "thought opened by the answer": ("\n<think>\nHm.\n</think>\n\nYes.", False, ParsedAnswer("Hm.", "Yes.")),
    "thought opened twice": ("<think>\nHm.</think>Yes.", True, ParsedAnswer("Hm.", "Yes.")),
    "empty thought": ("\n\n</think>\n\nYes.", True, ParsedAnswer("", "Yes.")),
    "two calls": (
        f"Writing it.\n\n{WRITE_CALL}\n{NOW_CALL}\n",
        False,
        ParsedAnswer("", "Writing it.", CALLS),
    ),
    "calls after thoughts": (
        f"Write, then ask.\n</think>\n\n{WRITE_CALL}\n{NOW_CALL}",
        True,
        ParsedAnswer("Write, then ask.", "", CALLS),
    ),
    "content around a call": (f"A\n{NOW_CALL}\n\nB", False, ParsedAnswer("", "A\n\nB", CALLS[1:])),
    "content after a call": (f"{NOW_CALL}\n\nB", False, ParsedAnswer("", "B", CALLS[1:])),
    "the older form": (
        '<tool_call>\n{"name": "write", "arguments": {"text": "{\\"</tool_call>\n", "lines": [2]}}\n</tool_call>',
        False,
        ParsedAnswer("", "", (ToolCall("write", {"text": '{"</tool_call>\n', "lines": [2]}),)),
    ),
    "the older form with backslashes": (
        r'<tool_call>{"name": "write", "arguments": {"text": "\\", "note": "}\\\"{"}}</tool_call>',
        False,
        ParsedAnswer("", "", (ToolCall("write", {"text": "\\", "note": '}\\"{'}),)),
    ),
    "the older form with arguments as text": (
        '<tool_call>{"name": "write", "arguments": "{\\"lines\\": 2}"}</tool_call>',
        False,
        ParsedAnswer("", "", (ToolCall("write", {"lines": 2}),)),
    ),
    "a closing tag forgotten": (
        "<tool_call>\n<function=write>\n<parameter=lines>\n3\n</function>\n</tool_call>" + NOW_CALL,
        False,
        ParsedAnswer("", "", (ToolCall("write", {"lines": 3}), CALLS[1])),
    ),
    "tags in a value": (
        "<tool_call>\n<function=write>\n<parameter=text>\n<tool_call></parameter> </think></function></tool_call >\n"
        "</parameter>\n</function>\n</tool_call>",
        False,
        ParsedAnswer(
            "",
            "",
            (ToolCall("write", {"text": "<tool_call></parameter> </think></function></tool_call >"}),),
        ),
    ),
    "tags mentioned": (
        "A <tool_call> has a <function=x> in it, </tool_call> ends it.\n<tool_call>\n<function=>\n",
        False,
        ParsedAnswer(
            "", "A <tool_call> has a <function=x> in it, </tool_call> ends it.\n<tool_call>\n<function=>\n"
        ),
    ),
    "JSON that is no call": (
        '<tool_call>{"a": 1}</tool_call> <tool_call>{"name": "f", "arguments": 3}</tool_call> <tool_call>{x}',
        False,
        ParsedAnswer(
            "",
            '<tool_call>{"a": 1}</tool_call> <tool_call>{"name": "f", "arguments": 3}</tool_call> <tool_call>{x}',
        ),
    ),
    "a call after a mention": (
        f"Not <tool_call>: that\n<tool_call> {NOW_CALL}",
        False,
        ParsedAnswer("", "Not <tool_call>: that\n<tool_call>", CALLS[1:]),
    ),
    "b89 calls in thoughts that end with them": (
        f"I must ask.\n{WRITE_CALL}\n{NOW_CALL}\n",
        True,
        ParsedAnswer("I must ask.", "", CALLS),
    ),
    "b89 calls in thoughts closed right after": (
        f"I must ask.\n{NOW_CALL}\n</think>\n\n",
        True,
        ParsedAnswer("I must ask.", "", CALLS[1:]),
    ),
    "b89 a call thought about": (
        f"Perhaps\n{NOW_CALL}\nor not.\n</think>\n\nNo.",
        True,
        ParsedAnswer(f"Perhaps\n{NOW_CALL}\nor not.", "No."),
    ),
    "b89 a call thought about, then content": (
        f"{NOW_CALL}\n</think>\n\nNo.",
        True,
        ParsedAnswer(NOW_CALL, "No."),
    ),
    "b89 a call thought about, then made": (
        f"Perhaps {NOW_CALL}</think>\n{WRITE_CALL}",
        True,
        ParsedAnswer(f"Perhaps {NOW_CALL}", "", CALLS[:1]),
    ),
    "b89 a tag mentioned in thoughts": (
        "The <tool_call> tag, and\n<tool_call>\n<function=now>\n<parameter=a>\n</think>\n\nNo.",
        True,
        ParsedAnswer("The <tool_call> tag, and\n<tool_call>\n<function=now>\n<parameter=a>", "No."),
    ),
    "cut in thoughts": ("I thi\n", True, ParsedAnswer("I thi")),
    "cut in a call": (
        f"A\n{NOW_CALL}\n<tool_call>\n<function=write>\n<parameter=text>\nabc",
        False,
        ParsedAnswer("", "A\n<tool_call>\n<function=write>\n<parameter=text>\nabc", CALLS[1:]),
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_b88_b89_an_answer_has_the_same_parts_however_it_is_cut(name: str) -> None:
    text, in_thought, expected = ANSWERS[name]
    assert parse_answer(text, TOOLS, in_thought=in_thought) == expected
    assert streamed(text, in_thought=in_thought) == expected
    for split in range(len(text) + 1):
        assert streamed((text[:split], text[split:]), in_thought=in_thought) == expected


FRAGMENTS = st.sampled_from(
    [
        *"<think> </think> <tool_call> </tool_call> <function=write> <function=now> </function>".split(),
        *'<parameter=text> <parameter=lines> </parameter> { } " \\ < > / a 7 é'.split(),
        *("\n", " ", '{"name": "now", "arguments": {', "</", "<tool_", NOW_CALL, WRITE_CALL),
    ]
)


@given(st.lists(FRAGMENTS, max_size=14), st.booleans(), st.booleans(), st.data())
def test_b88_any_text_has_the_same_parts_however_it_is_cut(
    fragments: list[str], in_thought: bool, with_tools: bool, data: st.DataObject
) -> None:
    text = "".join(fragments)
    tools = TOOLS if with_tools else None
    whole = streamed([text], tools, in_thought=in_thought)
    assert streamed(text, tools, in_thought=in_thought) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[start:stop] for start, stop in itertools.pairwise([0, *cuts, len(text)])]
    assert streamed(pieces, tools, in_thought=in_thought) == whole
    assert parse_answer(text, tools, in_thought=in_thought) == whole


@pytest.mark.parametrize("tools", [None, []])
def test_b89_tags_are_text_where_no_tools_are_declared(tools: Any) -> None:
    text = f"Write {NOW_CALL} for a <tool_call>.\n"
    assert streamed(text, tools) == parse_answer(text, tools) == ParsedAnswer("", text)


@pytest.mark.parametrize(
    "text", [f"A\n\n{WRITE_CALL}", f"{WRITE_CALL}\n{NOW_CALL}", "a </tool_call", "<tool_call>"]
)
def test_b88_an_answer_cut_anywhere_ends_in_text_and_never_in_half_a_call(text: str) -> None:
    for length in range(len(text)):
        answer = streamed([text[:length]])
        rest = text[:length]
        for call in (WRITE_CALL, NOW_CALL)[: len(answer.tool_calls)]:
            rest = rest.replace(call, "")
        assert "".join(answer.content.split()) == "".join(rest.split())


def test_text_is_told_as_soon_as_it_can_be_no_tag() -> None:
    parser = AnswerParser(TOOLS)
    assert parser.push("Hello <tool") == [Content("Hello")]
    assert parser.push("_box") == [Content(" <tool_box")]
    assert parser.push(f" {NOW_CALL[:-1]}") == []
    assert parser.push(">") == [CALLS[1]]
    assert parser.end() == []


VALUES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [
        "<parameter=x>",
        "</parameter>",
        "</function>",
        "<tool_call>",
        "\n",
        "\n\n",
        " <a> & 'b' \"c\"",
        "</think>",
    ]
)


@given(
    st.lists(
        st.dictionaries(st.sampled_from(["text", "note"]), VALUES)
        | st.fixed_dictionaries(
            {},
            optional={
                "lines": st.integers(),
                "force": st.booleans(),
                "ratio": st.floats(allow_nan=False, allow_infinity=False),
                "options": st.dictionaries(st.text(max_size=3), st.integers() | VALUES, max_size=2),
                "tags": st.lists(st.integers() | VALUES, max_size=3),
            },
        ),
        max_size=3,
    )
)
def test_b88_calls_come_back_as_the_template_writes_them(
    nano_template: ChatTemplate, calls: list[dict]
) -> None:
    message = ParsedAnswer("", "So:", tuple(ToolCall("write", arguments) for arguments in calls)).message()
    question = {"role": "user", "content": "Hi"}
    rendered = nano_template.render([question, message], tools=TOOLS, add_generation_prompt=False)
    answer = rendered.rpartition("<|im_start|>assistant\n<think>\n")[2].removesuffix("<|im_end|>\n")
    assert streamed(answer, in_thought=True).message() == message
    arguments = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    assert arguments == calls


@pytest.fixture(scope="module")
def nano_template() -> ChatTemplate:
    from qwen35_jax.checkpoint.model_name import find_model

    return ChatTemplate.from_folder(find_model("nano"))


@pytest.mark.parametrize(("thinking", "opened"), [(True, True), (False, False)])
def test_the_prompt_tells_whether_thoughts_are_open(
    nano_template: ChatTemplate, thinking: bool, opened: bool
) -> None:
    messages = [{"role": "user", "content": "What is <think>"}]
    assert opens_thought(nano_template.render(messages, enable_thinking=thinking)) == opened


def test_malformed_tools_are_refused_before_the_answer() -> None:
    with pytest.raises(PromptError, match=r"tools\[0\].function.name is missing"):
        AnswerParser([{"type": "function", "function": {}}])
