"""Marks: characters without a meaning that are put into texts to tell, after rendering, where something ended up.

A template writes one long text. What in it came from where cannot be read off that text, since a message may hold
anything, the names of special tokens included. Characters that Unicode keeps free of meaning, and that no message of
the conversation holds, can be told from everything else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qwen35_jax.errors import PromptError

MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Characters that Unicode keeps free of meaning."""


def unused_marks(value: Any, count: int) -> list[str]:
    """So many marks that stand in no text of a value.

    Raises:
        PromptError: its texts hold too many of them.
    """
    held = list(texts(value))
    free = [mark for mark in MARKS if not any(form in text for text in held for form in _forms(mark))]
    if len(free) < count:
        raise PromptError(
            f"the messages hold {len(MARKS) - len(free)} of the {len(MARKS)} characters to which Unicode gives no "
            "meaning: leave some of them out"
        )
    return free[:count]


def without_mark(text: str, mark: str) -> str:
    """A rendered text with every occurrence of a mark taken out."""
    for form in _forms(mark):
        text = text.replace(form, "")
    return text


def texts(value: Any) -> Iterator[str]:
    """Every text in a value made of mappings and lists, keys among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from texts(key)
            yield from texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from texts(part)


def map_texts(function: Callable[[str], str], value: Any) -> Any:
    """The value with a function applied to every text in it."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        return {map_texts(function, key): map_texts(function, part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map_texts(function, part) for part in value)
    return value


def _forms(mark: str) -> tuple[str, str]:
    """How a mark may look in a rendered text: a template may have written a value as JSON in ASCII."""
    return mark, json.dumps(mark)[1:-1]
