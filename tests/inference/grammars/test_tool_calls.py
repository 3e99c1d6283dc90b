"""Answers that have to call tools: what a walk writes is read back as calls that fit the tools' schemas."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35_jax.inference.chat.answer_parser import ParsedAnswer, parse_answer
from qwen35_jax.inference.chat.messages import MessageError
from qwen35_jax.inference.chat.tool_call import ToolCall
from qwen35_jax.inference.grammars.errors import GrammarError
from tests.inference.grammars.walks import (
    COMPILER,
    STOP_IDS,
    TOKENIZER,
    accepts,
    allowed_tokens,
    random_text,
)


def tool(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    function = {"name": name, **more}
    return {
        "type": "function",
        "function": function if parameters is None else {**function, "parameters": parameters},
    }


NOW = tool("now")
BOOK = tool(
    "book_trip",
    {
        "type": "object",
        "properties": {
            "note": {"type": "string"},
            "city": {"enum": ["Bonn", "São Paulo", "", "two\nlines "]},
            "days": {"type": "integer", "minimum": 1, "maximum": 30},
            "code": {"type": "string", "pattern": r"^[A-Z]{2}\d/?$"},
            "initials": {"type": "string", "minLength": 1, "maxLength": 3},
            "return": {"type": "boolean"},
            "class": {"anyOf": [{"const": "first"}, {"type": "null"}, {"enum": [2, True]}]},
            "guests": {"type": "array", "items": {"$ref": "#/$defs/guest"}, "minItems": 1, "maxItems": 2},
            "leader": {"$ref": "#/$defs/guest"},
            "anything": {},
        },
        "required": ["days", "city"],
        "$defs": {
            "guest": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "age": {"type": "integer", "minimum": 0, "maximum": 130},
                },
                "required": ["name"],
                "additionalProperties": False,
            }
        },
    },
)
TOOLS = [NOW, BOOK]


def check_calls(answer: ParsedAnswer, tools: list[dict[str, Any]]) -> None:
    """Calls and nothing else, each of a declared tool with arguments that fit its schema."""
    schemas = {entry["function"]["name"]: entry["function"].get("parameters", {}) for entry in tools}
    assert answer.tool_calls
    assert not answer.content
    for call in answer.tool_calls:
        schema = schemas[call.name]
        arguments = json.loads(call.arguments_json)
        jsonschema.Draft202012Validator(schema).validate(arguments)
        assert arguments.keys() <= schema.get("properties", {}).keys()


VALUES = st.one_of(
    st.just({"type": "string"}),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["null", "boolean"]}, {}]),
    st.sampled_from([{"type": "integer"}, {"type": "number"}]),
    st.builds(lambda values: {"enum": values}, st.lists(st.text(max_size=4), min_size=1, max_size=3)),
    st.builds(
        lambda least, span: {"type": "integer", "minimum": least, "maximum": least + span},
        st.integers(-99, 99),
        st.integers(0, 99),
    ),
    st.builds(
        lambda least, span: {"type": "string", "minLength": least, "maxLength": least + span},
        st.integers(0, 3),
        st.integers(0, 4),
    ),
    st.just(
        {
            "type": "object",
            "properties": {"a": {"enum": [1, "x"]}},
            "required": ["a"],
            "additionalProperties": False,
        }
    ),
)
NAMES = st.text('ab_-"\\é /=', min_size=1, max_size=3).filter(lambda name: name == name.strip())
SCHEMAS = st.builds(
    lambda properties, chosen: {
        "type": "object",
        "properties": properties,
        "required": [name for place, name in enumerate(properties) if chosen >> place & 1],
    },
    st.dictionaries(
        st.text('ab_-"\\é /=', min_size=1, max_size=3).filter(lambda name: name == name.strip()),
        VALUES,
        max_size=4,
    ),
    st.integers(0, 15),
)


@settings(max_examples=80)
@given(st.lists(SCHEMAS, min_size=1, max_size=2), st.booleans(), st.integers(0, 2**32))
def test_every_walk_is_read_back_as_calls_that_fit(
    schemas: list[dict[str, Any]], parallel: bool, seed: int
) -> None:
    tools = [tool(f"tool_{index}", schema) for index, schema in enumerate(schemas)]
    text = random_text(COMPILER.tool_calls(tools, parallel=parallel), random.Random(seed))
    answer = parse_answer(text, tools)
    check_calls(answer, tools)
    assert parallel or len(answer.tool_calls) == 1


@pytest.mark.parametrize("seed", range(25))
def test_walks_through_every_kind_of_parameter_are_read_back(seed: int) -> None:
    text = random_text(COMPILER.tool_calls(TOOLS, name="book_trip"), random.Random(seed))
    answer = parse_answer(text, TOOLS)
    check_calls(answer, TOOLS)
    assert {call.name for call in answer.tool_calls} == {"book_trip"}


def call_text(name: str, *parameters: tuple[str, str]) -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


BONN = (("city", "Bonn"), ("days", "3"))
ACCEPTED = {
    "without parameters": call_text("now"),
    "two calls": call_text("now") + "\n" + call_text("book_trip", *BONN),
    "in another order": call_text("book_trip", *reversed(BONN)),
    "an optional one between": call_text("book_trip", BONN[0], ("note", "x"), BONN[1]),
    "text with tags and line breaks": call_text(
        "book_trip", ("note", "if a < b:\n\n</b> <parameter=x>\n</function>\n 'é 🙂'"), *BONN
    ),
    "an empty text": call_text("book_trip", ("note", ""), *BONN),
    "a tag on the text's own line": call_text("book_trip", ("note", "text"), *BONN).replace("text\n", "text"),
    "a listed text of two lines": call_text("book_trip", ("city", "two\nlines "), BONN[1]),
    "Python's spelling of a boolean": call_text("book_trip", *BONN, ("return", "True")),
    "JSON with spaces": call_text("book_trip", *BONN, ("guests", '[{"name": "x", "age": 4}, {"name": "y"}]')),
    "compact JSON": call_text("book_trip", *BONN, ("guests", '[{"name":"x","age":4},{"name":"y"}]')),
    "a schema elsewhere": call_text("book_trip", *BONN, ("leader", '{"name": "</parameter>"}')),
    "one of several types": call_text("book_trip", *BONN, ("class", "None")),
    "a number that is listed": call_text("book_trip", *BONN, ("class", "2")),
    "a pattern": call_text("book_trip", *BONN, ("code", "AB1/")),
}
REFUSED = {
    "nothing": "",
    "words": "Sure.",
    "words before a call": "Sure.\n\n" + call_text("now"),
    "words after a call": call_text("now") + " Done.",
    "an unknown tool": call_text("then"),
    "an unknown parameter": call_text("now", ("x", "1")),
    "a required parameter left out": call_text("book_trip", BONN[0]),
    "a parameter given twice": call_text("book_trip", *BONN, BONN[0]),
    "a text that is not listed": call_text("book_trip", ("city", "Rome"), BONN[1]),
    "a number out of bounds": call_text("book_trip", BONN[0], ("days", "31")),
    "a text for a number": call_text("book_trip", BONN[0], ("days", "three")),
    "a text that is too long": call_text("book_trip", *BONN, ("initials", "abcd")),
    "a text against its pattern": call_text("book_trip", *BONN, ("code", "ab1")),
    "a text that ends the call": call_text("book_trip", ("note", "</function>\n</tool_call>"), *BONN),
    "an object that lacks something": call_text("book_trip", *BONN, ("leader", '{"age": 4}')),
}


@pytest.mark.parametrize("text", ACCEPTED.values(), ids=ACCEPTED)
def test_calls_are_accepted_as_the_template_writes_them(text: str) -> None:
    assert accepts(COMPILER.tool_calls(TOOLS), text)
    check_calls(parse_answer(text, TOOLS), TOOLS)


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_what_is_no_call_that_fits_is_refused(text: str) -> None:
    assert not accepts(COMPILER.tool_calls(TOOLS), text)


@pytest.mark.parametrize("value", ["🙂", "\x7f", "\x00", "\u2028", "\\", '"', "a\tb", "\ufeff", "\n", "<"])
def test_listed_texts_may_hold_any_character(value: str) -> None:
    listed = [tool("f", {"properties": {"x": {"enum": [value]}}})]
    text = call_text("f", ("x", value))
    assert accepts(COMPILER.tool_calls(listed), text)
    assert parse_answer(text, listed).tool_calls == (ToolCall("f", {"x": value}),)


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("b", ["b", "abc", "b\n"], ["", "a"]),
        ("^b", ["b", "bc"], ["ab"]),
        ("b$", ["b", "ab"], ["bc"]),
        (r"^\$\$", ["$$", "$$1"], ["$", "a"]),
        (r"^a\\$", ["a\\"], ["a", "a\\b"]),
        ("^a/b|c$", ["a/b", "c"], ["b"]),
    ],
)
def test_patterns_match_anywhere_but_where_they_are_anchored(
    pattern: str, matching: list[str], others: list[str]
) -> None:
    tools = [tool("f", {"properties": {"x": {"type": "string", "pattern": pattern}}})]
    for value in matching:
        assert accepts(COMPILER.tool_calls(tools), call_text("f", ("x", value)))
    for value in others:
        assert not accepts(COMPILER.tool_calls(tools), call_text("f", ("x", value)))


@pytest.mark.parametrize(
    ("kind", "values", "others"),
    [
        ("integer", ["0", "-12", 20 * "1"], ["01", "1.5", "1e3", 21 * "1", "-"]),
        (
            "number",
            ["-0.25", "3", "1.5e-10", f"{20 * '1'}.{20 * '1'}"],
            [".5", "1.", 21 * "1", "0." + 21 * "1", "1e100"],
        ),
    ],
)
def test_numbers_without_bounds_end(kind: str, values: list[str], others: list[str]) -> None:
    tools = [tool("f", {"properties": {"x": {"type": [kind, "null"], "description": "How many."}}})]
    for value in values:
        text = call_text("f", ("x", value))
        assert accepts(COMPILER.tool_calls(tools), text)
        check_calls(parse_answer(text, tools), tools)
    for value in others:
        assert not accepts(COMPILER.tool_calls(tools), call_text("f", ("x", value)))


def test_a_value_of_several_parts_is_held_to_all_of_them() -> None:
    parts = [{"type": "integer"}, {"type": "integer", "minimum": 3}]
    tools = [tool("f", {"properties": {"x": {"allOf": parts}}})]
    assert accepts(COMPILER.tool_calls(tools), call_text("f", ("x", "3")))
    assert not accepts(COMPILER.tool_calls(tools), call_text("f", ("x", "2")))


def test_a_call_begins_with_the_token_of_its_tag() -> None:
    constraint = COMPILER.tool_calls(TOOLS)
    assert allowed_tokens(constraint) == {TOKENIZER.token_id("<tool_call>")}


def test_one_call_only_where_parallel_ones_are_not_wanted() -> None:
    constraint = COMPILER.tool_calls(TOOLS, parallel=False)
    assert accepts(constraint, call_text("now"))
    assert allowed_tokens(constraint) == set(STOP_IDS)


def test_a_named_tool_is_the_only_one() -> None:
    assert accepts(COMPILER.tool_calls(TOOLS, name="now"), call_text("now"))
    assert not accepts(COMPILER.tool_calls(TOOLS, name="book_trip"), call_text("now"))


def test_a_text_may_be_what_else_its_schema_allows() -> None:
    either = tool("f", {"properties": {"x": {"anyOf": [{"type": "string"}, {"type": "object"}]}}})
    text = call_text("f", ("x", '{"a": [1]}'))
    assert accepts(COMPILER.tool_calls([either]), text)
    assert parse_answer(text, [either]).tool_calls == (ToolCall("f", {"x": {"a": [1]}}),)


def test_keywords_that_no_grammar_holds_are_refused_for_strict_tools_only() -> None:
    parameters = {"properties": {"x": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}}
    assert accepts(COMPILER.tool_calls([tool("f", parameters)]), call_text("f", ("x", "[1, 1]")))
    with pytest.raises(GrammarError, match="uniqueItems"):
        COMPILER.tool_calls([tool("f", parameters, strict=True)])


def test_a_schema_that_refers_to_itself_inside_of_json_is_followed() -> None:
    parameters = {
        "$id": "https://example.org/tree",
        "properties": {"tree": {"$ref": "#/$defs/tree"}},
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"tree": {"allOf": [{"$ref": "#/$defs/tree"}]}},
                "additionalProperties": False,
            }
        },
    }
    assert accepts(
        COMPILER.tool_calls([tool("f", parameters)]), call_text("f", ("tree", '{"tree": {"tree": {}}}'))
    )
    assert not accepts(COMPILER.tool_calls([tool("f", parameters)]), call_text("f", ("tree", '{"tree": 1}')))


WRONG = {
    "no tool": ([], None, "no tool is declared"),
    "an unknown name": (TOOLS, "then", "no tool is called 'then', the declared ones are now, book_trip"),
    "a name that ends a tag": ([tool("a>b")], None, "the name of tool 'a>b' cannot be told"),
    "a parameter's name that ends a tag": (
        [tool("f", {"properties": {"a>": {}}})],
        None,
        "the name of parameter 'a>' of tool 'f'",
    ),
    "a listed value with a tag": (
        [tool("f", {"properties": {"x": {"enum": ["</parameter>\n</function>"]}}})],
        None,
        "a value listed for parameter 'x' of tool 'f'",
    ),
    "nothing to be": ([tool("f", {"properties": {"x": {"enum": []}}})], None, "'x' of tool 'f' has no value"),
    "a circle": (
        [tool("f", {"properties": {"x": {"$ref": "#/properties/x"}}})],
        None,
        "parameter 'x' of tool 'f' refers to itself",
    ),
    "a reference to nothing": (
        [tool("f", {"properties": {"x": {"$ref": "#/$defs/y"}}})],
        None,
        r"refers to '#/\$defs/y', which is no part of it",
    ),
    "an object with too many properties": (
        [
            tool(
                "f",
                {"properties": {"x": {"properties": {f"p{i}": {} for i in range(2_001)}, "type": "object"}}},
            )
        ],
        None,
        "parameter 'x' of tool 'f' cannot be held to its schema: an object has 2001 properties",
    ),
    "too many parameters": (
        [tool("f", {"properties": {f"x{number}": {} for number in range(65)}})],
        None,
        "has 65 parameters, and calls can be held to 64",
    ),
    "a broken pattern": (
        [tool("f", {"properties": {"x": {"type": "string", "pattern": "("}}})],
        None,
        "parameter 'x' of tool 'f' cannot be held to its schema: .*unclosed group",
    ),
    "an anchor inside of a pattern": (
        [tool("f", {"properties": {"x": {"type": "string", "pattern": "a$b"}}})],
        None,
        "parameter 'x' of tool 'f' cannot be held to its schema: lookarounds",
    ),
    "lengths that contradict each other": (
        [tool("f", {"properties": {"x": {"type": "string", "minLength": 5, "maxLength": 3}}})],
        None,
        "parameter 'x' of tool 'f' cannot be held to its schema: .*minLength",
    ),
    "half a character": (
        [tool("f", {"properties": {"x": {"enum": ["\ud800"]}}})],
        None,
        "the tools' schemas",
    ),
    "a schema that refers to nothing inside": (
        [tool("f", {"properties": {"x": {"type": "array", "items": {"$ref": "#/$defs/y"}}}})],
        None,
        "parameter 'x' of tool 'f' cannot be held to its schema: Pointer",
    ),
    "too many tools": ([tool(f"f{number}") for number in range(129)], None, "129 tools .* held to 128"),
    "parameters that stand elsewhere": (
        [tool("f", {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}})],
        None,
        r"the parameters of tool 'f' have \$ref, .* write the properties out",
    ),
    "parameters that are alternatives": (
        [tool("f", {"anyOf": [{"type": "object"}]})],
        None,
        "the parameters of tool 'f' have anyOf",
    ),
    "parameters that are no object": (
        [tool("f", {"type": "array"})],
        None,
        "are 'array', expected an object",
    ),
    "a type that is none": (
        [tool("f", {"properties": {"x": {"type": "int"}}})],
        None,
        "'x' of tool 'f' .*Invalid type: int",
    ),
}


@pytest.mark.parametrize(("tools", "name", "why"), WRONG.values(), ids=WRONG)
def test_tools_that_calls_cannot_be_held_to_are_refused_in_one_line(
    tools: Any, name: str | None, why: str
) -> None:
    with pytest.raises(GrammarError, match=why) as caught:
        COMPILER.tool_calls(tools, name=name)
    assert len(str(caught.value)) < 400


def test_a_malformed_tool_is_told_by_its_field() -> None:
    with pytest.raises(MessageError, match=r"tools\[0\]\.function\.name is missing"):
        COMPILER.tool_calls([{"type": "function", "function": {}}])


def test_sixty_four_parameters_can_all_be_given() -> None:
    names = [f"x{number}" for number in range(64)]
    many = tool("f", {"properties": {name: {"type": "boolean"} for name in names}, "required": names})
    parameters = [(name, "true") for name in reversed(names)]
    assert accepts(COMPILER.tool_calls([many]), call_text("f", *parameters))
    assert not accepts(COMPILER.tool_calls([many]), call_text("f", *parameters[:-1]))
