"""The types of a tool call's arguments, which its text does not tell: from the JSON schema of the tool.

A value of a type other than string is JSON, or what Python prints for true, false and none, as the family's template
writes them when it shows the model its earlier calls. A text that is no value of the declared type stays a text: the
tool is the one to complain about it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

_SPELLINGS: dict[str, dict[str, Any]] = {
    "null": {"null": None, "None": None},
    "boolean": {"true": True, "false": False, "True": True, "False": False},
}
_IS_TYPE: dict[str, Callable[[Any], bool]] = {
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
}


def typed_arguments(values: Mapping[str, str], schema: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with the types that a schema declares.

    Where several types are declared, a text is a string only if it is none of the others. A parameter without a
    declared type is a string.

    Args:
        values: text of each parameter.
        schema: JSON schema of the whole; of it `properties` and, for references, `$defs` are read.
    """
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    return {
        name: _typed(text, _declared_types(properties.get(name), schema)) for name, text in values.items()
    }


def read_json(text: str) -> Any:
    """A JSON value, which may hold line breaks in its strings, as models write them.

    Raises:
        ValueError: the text is no JSON, is nested too deeply, or holds a number that JSON cannot hold.
    """
    try:
        return json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _typed(text: str, types: set[str]) -> Any:
    bare = text.strip()
    for name, spellings in _SPELLINGS.items():
        if name in types and bare in spellings:
            return spellings[bare]
    wanted = [is_type for name, is_type in _IS_TYPE.items() if name in types]
    if wanted:
        try:
            value = read_json(bare)
        except ValueError:
            return text
        if any(is_type(value) for is_type in wanted):
            return value
    return text


def _declared_types(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Names of all types that a value may have."""
    types: set[str] = set()
    followed: set[str] = set()  # schemas may refer to themselves
    ahead = [schema]
    while ahead:
        schema = ahead.pop()
        if not isinstance(schema, Mapping):
            continue
        declared = schema.get("type")
        types.update(name for name in _as_list(declared) if isinstance(name, str))
        if declared is None:
            constants = [*_as_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
            types.update(map(_type_of, constants))
        for alternatives in ("anyOf", "oneOf", "allOf"):
            ahead.extend(_as_list(schema.get(alternatives)))
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            ahead.append(part_named(reference, root))
    return types


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [] if value is None else [value]


def part_named(reference: str, root: Mapping[str, Any]) -> Any:
    """The part of the schema that a reference such as `#/$defs/City` names; None if there is none."""
    if not reference.startswith("#/"):
        return None
    part: Any = root
    for name in reference[2:].split("/"):
        part = part.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
    return part


def _type_of(constant: Any) -> str:
    if constant is None:
        return "null"
    if isinstance(constant, bool):
        return "boolean"
    return next((name for name, is_type in _IS_TYPE.items() if is_type(constant)), "string")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        _refuse(digits)
    return number


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")
