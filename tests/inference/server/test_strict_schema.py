"""Schemas that are declared strict leave nothing open, or are refused by the object that does."""

from __future__ import annotations

from typing import Any

import pytest

from qwen35_jax.inference.server.api_error import ApiError
from qwen35_jax.inference.server.strict_schema import refuse_open_schema
from tests.inference.server.test_chat import HELLO, TOOLS, post
from tests.inference.server.test_refusals import CHAT, refused


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


CITY = closed(name={"type": "string"}, people={"type": ["integer", "null"]})
OPEN = {key: value for key, value in CITY.items() if key != "additionalProperties"}
OPTIONAL = CITY | {"required": ["name"]}


@pytest.mark.parametrize(
    "schema",
    [CITY, closed(), closed(a={"anyOf": [CITY, {"type": "null"}]}), {"items": CITY}, {"enum": [1]}, {}],
)  # fmt: skip
def test_a_schema_that_leaves_nothing_open_is_taken(schema):
    refuse_open_schema(schema, "s")


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        (OPEN, "s.additionalProperties"),
        (CITY | {"additionalProperties": {}}, "s.additionalProperties"),
        (OPTIONAL, "s.required"),
        ({"type": "object"}, "s.additionalProperties"),
        ({"type": ["null", "object"]}, "s.additionalProperties"),
        (closed(a=OPEN), "s.properties.a.additionalProperties"),
        ({"type": "array", "items": OPTIONAL}, "s.items.required"),
        ({"anyOf": [CITY, OPEN]}, "s.anyOf[1].additionalProperties"),
        ({"$ref": "#/$defs/b", "$defs": {"b": OPEN}}, "s.$defs.b.additionalProperties"),
    ],
)
def test_a_schema_that_leaves_something_open_is_refused_by_its_place(schema, param):
    with pytest.raises(ApiError, match="strict") as caught:
        refuse_open_schema(schema, "s")
    assert caught.value.param == param


def formatted(schema: dict[str, Any], strict: bool | None) -> dict[str, Any]:
    described = {"name": "x", "schema": schema, "strict": strict}
    return {"response_format": {"type": "json_schema", "json_schema": described}}


def declared(schema: dict[str, Any], strict: bool | None) -> dict[str, Any]:
    function = {"name": "f", "parameters": schema, "strict": strict}
    return {"tools": [*TOOLS, {"type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("ask", "place"),
    [(formatted, "response_format.json_schema.schema"), (declared, "tools[2].function.parameters")],
)
def test_only_what_is_declared_strict_has_to_be_closed(client, ask, place):
    for schema in (OPEN, OPTIONAL):
        post(client, **ask(schema, None))
        post(client, **ask(schema, False))
        error = refused(client.post(CHAT, json={"messages": HELLO} | ask(schema, True)))
        assert error["param"].startswith(place)
    post(client, **ask(CITY, True))
