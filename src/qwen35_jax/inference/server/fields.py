"""The fields of a request, read one by one: each of its type, and none that nobody reads."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from qwen35_jax.inference.server.api_error import ApiError, field_error, shown


class Fields:
    """The fields of a JSON object. As in the API, null stands for a field that is not given.

    Args:
        content: the object.
        place: name of the field that holds it; empty for the request itself.

    Every method that reads raises `ApiError` with the field's name where the value is of another type.
    """

    def __init__(self, content: Mapping[str, Any], place: str = ""):
        self._content = content
        self._place = place
        self._known: set[str] = set()

    def name(self, key: str) -> str:
        """How an error calls a field."""
        return f"{self._place}.{key}" if self._place else key

    def value(self, key: str) -> Any:
        """Of any type."""
        self._known.add(key)
        return self._content.get(key)

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self._typed(key, bool, "true or false")
        return default if value is None else value

    def text(self, key: str) -> str | None:
        return self._typed(key, str, "a string")

    def number(self, key: str) -> int | float | None:
        value = self._typed(key, int | float, "a number")
        return self._not_boolean(key, value, "a number")

    def integer(self, key: str, least: int, most: int) -> int | None:
        expected = f"an integer from {least} to {most}"
        value = self._not_boolean(key, self._typed(key, int, expected), expected)
        if value is not None and not least <= value <= most:
            raise field_error(self.name(key), f"is {shown(value)}, expected {expected}")
        return value

    def items(self, key: str) -> list[Any] | None:
        return self._typed(key, list, "a list")

    def mapping(self, key: str) -> dict[str, Any] | None:
        return self._typed(key, dict, "an object")

    def inner(self, key: str) -> Fields | None:
        """The fields of an object within this one."""
        content = self.mapping(key)
        return None if content is None else Fields(content, self.name(key))

    def choice(self, key: str, choices: Sequence[str]) -> str | None:
        """One of a few strings."""
        expected = f"one of {', '.join(choices)}"
        value = self._typed(key, str, expected)
        if value is not None and value not in choices:
            raise field_error(self.name(key), f"is {shown(value)}, expected {expected}")
        return value

    def refuse(self, reasons: Mapping[str, str], *, harmless: Sequence[Any] = ()) -> None:
        """Refuses fields that ask for what is not done here.

        Args:
            reasons: by field, what to say.
            harmless: values that ask for nothing.
        """
        for key, reason in reasons.items():
            value = self.value(key)
            if value is not None and value not in harmless:
                raise field_error(self.name(key), reason, code="unsupported_parameter")

    def refuse_unread(self, ignored: Collection[str] = ()) -> None:
        """Refuses fields that nothing has asked for: most are misspelt, and would be missed.

        Args:
            ignored: fields that may be there and change no answer.
        """
        for key, value in self._content.items():
            if value is None or key in self._known or key in ignored:
                continue
            near = difflib.get_close_matches(key[:100], sorted(self._known), n=1)
            hint = f": did you mean {near[0]}?" if near else ""
            name = self.name(key)
            raise ApiError(
                f"{shown(name)} is no field of this request{hint}", param=name, code="unknown_parameter"
            )

    def _typed(self, key: str, kind: Any, expected: str) -> Any:
        value = self.value(key)
        if value is not None and not isinstance(value, kind):
            raise field_error(self.name(key), f"is {shown(value)}, expected {expected}", code="invalid_type")
        return value

    def _not_boolean(self, key: str, value: Any, expected: str) -> Any:
        if isinstance(value, bool):  # an integer, to Python
            raise field_error(self.name(key), f"is {shown(value)}, expected {expected}", code="invalid_type")
        return value
