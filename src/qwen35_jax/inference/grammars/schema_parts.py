"""Parts of a JSON schema: those that it refers to, and objects that leave an answer too many ways to go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qwen35_jax.inference.chat.argument_types import part_named
from qwen35_jax.inference.grammars.errors import GrammarError

MOST_OPTIONAL = 2_000
"""Properties that may be left out, of one object with all that it may be instead. A grammar has to expect each of them
after each other one: with so many a token takes it some 50 ms, and other answers wait meanwhile."""

_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_VALUES = ("const", "enum", "default", "examples")


def referred(reference: str, root: Mapping[str, Any]) -> Any:
    """The part of the schema that a reference names, `#` being all of it; None if there is none."""
    return root if reference == "#" else part_named(reference, root)


def refuse_wide_objects(schema: Any, root: Mapping[str, Any]) -> None:
    """Refuses a schema whose grammar would become too complex in the middle of an answer.

    Args:
        schema: or a part of one.
        root: that its references start from.

    Raises:
        GrammarError: an object has more than `MOST_OPTIONAL` properties that may be left out.
    """
    counted: dict[int, int] = {}
    ahead = [schema]
    while ahead:
        part = ahead.pop()
        if isinstance(part, Mapping):
            count = _optional_properties(part, root, counted)
            if count > MOST_OPTIONAL:
                raise GrammarError(
                    f"an object has {count} properties that may be left out, its alternatives among them, and answers "
                    f"can be held to {MOST_OPTIONAL} at most: require some, or put them into objects of their own"
                )
            ahead += [value for key, value in part.items() if key not in _VALUES]
        elif isinstance(part, list):
            ahead += part


def _optional_properties(schema: Any, root: Mapping[str, Any], counted: dict[int, int]) -> int:
    """How many properties may be left out of what a schema describes, alternatives and parts of it together.

    Args:
        schema: to count in.
        root: that references start from.
        counted: what has been counted, by the schema's identity; added to.
    """
    if not isinstance(schema, Mapping):
        return 0
    if id(schema) in counted:
        return counted[id(schema)]
    counted[id(schema)] = 0  # for a schema that refers to itself
    properties, required, reference = (schema.get(key) for key in ("properties", "required", "$ref"))
    names = set(properties) if isinstance(properties, Mapping) else set()
    if isinstance(required, Sequence):
        names.difference_update(name for name in required if isinstance(name, str))
    instead = [part for key in _ALTERNATIVES if isinstance(schema.get(key), list) for part in schema[key]]
    if isinstance(reference, str):
        instead.append(referred(reference, root))
    counted[id(schema)] = len(names) + sum(_optional_properties(part, root, counted) for part in instead)
    return counted[id(schema)]
