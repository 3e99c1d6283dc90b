"""Arguments take the type that the tool's schema declares, and stay texts where they are no such value."""

from __future__ import annotations

from typing import Any

import pytest

from qwen35_jax.inference.chat.argument_types import read_json, typed_arguments

NULLABLE = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
SELF = {"anyOf": [{"$ref": "#/$defs/tree"}, {"$ref": "#/$defs/tree"}, {"type": "boolean"}]}


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, " true ", " true "),
        ({"type": "integer"}, " 12\n", 12),
        ({"type": "integer"}, "-3", -3),
        ({"type": "integer"}, "1.5", "1.5"),
        ({"type": "integer"}, "true", "true"),
        ({"type": "integer"}, "12 apples", "12 apples"),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "number"}, "1.5", 1.5),
        ({"type": "number"}, "2", 2),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "null"}, "None", None),
        ({"type": "object"}, '{"a": [1, null]}', {"a": [1, None]}),
        ({"type": "object"}, "[1]", "[1]"),
        ({"type": "object"}, "{'a': 1}", "{'a': 1}"),
        ({"type": "array"}, '["a\nb"]', ["a\nb"]),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "integer"]}, "five", "five"),
        (NULLABLE, "7", 7),
        (NULLABLE, "null", None),
        ({"$ref": "#/$defs/count"}, "7", 7),
        ({"$ref": "#/$defs/tree"}, "true", True),
        ({"$ref": "#/$defs/nowhere"}, "7", "7"),
        ({"$ref": "elsewhere.json"}, "7", "7"),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"const": True}, "true", True),
        ({}, "7", "7"),
        (None, "7", "7"),
        ("junk", "7", "7"),
        ({"type": 3}, "7", "7"),
    ],
)
def test_b88_values_are_typed_by_the_schema(schema: Any, text: str, expected: Any) -> None:
    whole = {"properties": {"value": schema}, "$defs": {"count": {"type": "integer"}, "tree": SELF}}
    value = typed_arguments({"value": text, "undeclared": "1"}, whole)
    assert value == {"value": expected, "undeclared": "1"}
    assert type(value["value"]) is type(expected)


@pytest.mark.parametrize("schema", [{}, {"properties": None}, {"properties": [1]}])
def test_without_declared_parameters_every_value_is_a_text(schema: Any) -> None:
    assert typed_arguments({"value": "1"}, schema) == {"value": "1"}


@pytest.mark.parametrize("text", ["", "{", "NaN", "[-Infinity]", "1e400", "[" * 100_000])
def test_what_json_cannot_hold_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        read_json(text)
