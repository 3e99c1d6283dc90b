"""What `strict: true` asks of a schema: that it leaves nothing open.

Answers keep to every schema here, and so do required calls, whether it is called strict or not. What `strict` adds is
the promise that an answer has the properties that were written out and no others. As in the API it is refused for a
schema that does not say so: every object in it needs `additionalProperties: false`, and all its properties in
`required`. One that may be left out has null among its types instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qwen35_jax.inference.server.api_error import field_error, shown

_BY_NAME = ("properties", "$defs", "definitions")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_ADVICE = "strict asks for that in every object; without strict, answers keep to the schema as it is"


def refuse_open_schema(schema: Mapping[str, Any], field: str) -> None:
    """Refuses a schema with an object whose properties are not all told.

    Args:
        schema: declared strict.
        field: that it stands in.

    Raises:
        ApiError: names the object within the schema.
    """
    ahead: list[tuple[str, Any]] = [(field, schema)]
    while ahead:
        place, part = ahead.pop()
        if not isinstance(part, Mapping):
            continue
        properties = part.get("properties")
        names = list(properties) if isinstance(properties, Mapping) else []
        kind = part.get("type")
        if names or kind == "object" or (isinstance(kind, list) and "object" in kind):
            _check_object(part, names, place)
        ahead += _parts(part, place)


def _check_object(schema: Mapping[str, Any], names: list[str], place: str) -> None:
    if schema.get("additionalProperties") is not False:
        raise field_error(f"{place}.additionalProperties", f"has to be given and false: {_ADVICE}")
    required = schema.get("required")
    missing = next((name for name in names if not isinstance(required, list) or name not in required), None)
    if missing is not None:
        raise field_error(
            f"{place}.required", f"has to list every property, and does not list {shown(missing)}: {_ADVICE}"
        )


def _parts(schema: Mapping[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    for key in _BY_NAME:
        if isinstance(schema.get(key), Mapping):
            yield from ((f"{place}.{key}.{name}", part) for name, part in schema[key].items())
    for key in _LISTED:
        if isinstance(schema.get(key), list):
            yield from ((f"{place}.{key}[{index}]", part) for index, part in enumerate(schema[key]))
    yield f"{place}.items", schema.get("items")
