"""Lines of a JSONL file of chats and texts, checked before anything is done with them.

A line is a JSON object that holds one of

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}], "tools": [...]}
    {"prompt": "...", "completion": "..."}
    {"text": "..."}
    {"parts": [["...", 0.1], ["...", 1], ["...", 0]]}

where `tools` may be left out, and the numbers of `parts` are weights in the loss. Other fields are not looked at; of an
object with several of these forms the first in this order counts. Blank lines are allowed, so is a byte order mark.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from qwen35_jax.errors import Qwen35Error
from qwen35_jax.inference.chat.marks import texts
from qwen35_jax.inference.chat.messages import MessageError, checked_messages, checked_tools

FORMS = "messages, or prompt and completion, or text, or parts"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 60


class DataError(Qwen35Error):
    """Training data that cannot be used: names the file and the line."""


class Chat(NamedTuple):
    """A conversation, see `checked_messages` and `checked_tools`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


class Completion(NamedTuple):
    """A text of which only the second part is learned."""

    prompt: str
    completion: str


class Text(NamedTuple):
    """A text that is learned whole."""

    text: str


class Parts(NamedTuple):
    """A text in parts that follow each other without anything between them.

    Attributes:
        parts: of each its text, and how much a token of it counts in the loss.
    """

    parts: tuple[tuple[str, float], ...]


AnyForm = Chat | Completion | Text | Parts
"""What a line of the data of fine-tuning may say."""


Content = TypeVar("Content")


class Record(NamedTuple, Generic[Content]):
    """What a line says.

    Attributes:
        place: file and line, for messages.
        content: the line's.
    """

    place: str
    content: Content


ContentOf = Callable[[str, dict[str, Any]], Content]
"""Makes of the place and the object of a line what it says, or raises `DataError`."""


def read_records(path: str | os.PathLike[str]) -> list[Record[AnyForm]]:
    """All records of a JSONL file, in order.

    Raises:
        DataError: the file cannot be read or holds no record, or a line is not UTF-8, no JSON object, of none of the
            forms, or malformed in a field; names the line.
    """
    return read_lines(path, _content, FORMS)


def read_lines(
    path: str | os.PathLike[str], content_of: ContentOf[Content], forms: str
) -> list[Record[Content]]:
    """All records of a JSONL file of any forms, in order.

    Args:
        path: of the file.
        content_of: reads an object.
        forms: the fields of such objects, for messages.

    Raises:
        DataError: as `read_records`.
    """
    try:
        with Path(path).open("rb") as file:
            records = [
                _record(f"{path}, line {number}", line, content_of, forms) for number, line in _lines(file)
            ]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    if not records:
        raise DataError(f"{path} holds no record, expected lines of JSON with {forms}")
    return records


def no_form(place: str, content: dict[str, Any], forms: str) -> DataError:
    """The complaint about a line that has not the fields of any form."""
    found = ", ".join(_REPR.repr(key) for key in list(content)[:8]) or "none"
    return DataError(f"{place} has the fields {found}, expected {forms}")


def _lines(file: Any) -> Iterator[tuple[int, bytes]]:
    """Numbers from 1 and bytes of the lines that are not blank. Only a line feed ends a line, as JSONL has it."""
    for number, line in enumerate(file, 1):
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if line.strip():
            yield number, line


def _record(place: str, line: bytes, content_of: ContentOf[Content], forms: str) -> Record[Content]:
    try:
        content = json.loads(line.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place} is not UTF-8 text (byte {error.start} of the line is {error.object[error.start]:#04x}): "
            "save the file as UTF-8"
        ) from error
    except (ValueError, RecursionError) as error:
        start = _REPR.repr(line.decode(errors="replace").strip())
        raise DataError(
            f"{place} is no JSON: {error}; found {start}, expected an object with {forms}"
        ) from error
    if not isinstance(content, dict):
        raise DataError(f"{place} is {_REPR.repr(content)}, expected a JSON object with {forms}")
    if b"\\u" in line:
        _check_surrogates(place, content)
    return Record(place, content_of(place, content))


def _content(place: str, content: dict[str, Any]) -> AnyForm:
    if "messages" in content:
        try:
            messages = checked_messages(content["messages"])
            tools = checked_tools(content["tools"]) if content.get("tools") else None
        except MessageError as error:
            raise DataError(f"{place}: {error}") from error
        if not messages:
            raise DataError(f"{place}: messages is empty, expected a conversation")
        return Chat(messages, tools)
    if "prompt" in content and "completion" in content:
        return Completion(*(_text(place, content, field) for field in ("prompt", "completion")))
    if "text" in content:
        return Text(_text(place, content, "text"))
    if "parts" in content:
        return Parts(_parts(place, content["parts"]))
    raise no_form(place, content, FORMS)


def _text(place: str, content: dict[str, Any], field: str) -> str:
    value = content[field]
    if not isinstance(value, str):
        raise DataError(
            f"{place}: {field} is {_REPR.repr(value)}, expected a text; a conversation goes into messages"
        )
    return value


def _parts(place: str, value: Any) -> tuple[tuple[str, float], ...]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: parts is {_REPR.repr(value)}, expected a list of pairs of text and weight")
    for index, part in enumerate(value):
        if not (
            isinstance(part, list) and len(part) == 2 and isinstance(part[0], str) and _is_weight(part[1])
        ):
            raise DataError(
                f"{place}: parts[{index}] is {_REPR.repr(part)}, expected a text and its weight in the loss, a number "
                "of at least 0"
            )
    return tuple((text, float(weight)) for text, weight in value)


def _is_weight(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _check_surrogates(place: str, content: dict[str, Any]) -> None:
    r"""JSON may write half a character, as in "\ud83d"; it is no text, and no tokenizer takes it."""
    for text in texts(content):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = _REPR.repr(error.object[error.start])
            raise DataError(
                f"{place} holds {half}, half of a surrogate pair, expected whole characters"
            ) from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
