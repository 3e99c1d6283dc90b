"""Strict reading of a JSON file, with errors that say where."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from qwen35_jax.errors import ConfigError

JsonObject = dict[str, Any]

_MOST_DIGITS = 40
_MOST_BYTES = 100_000_000  # as for the header of a safetensors file


def load_json(path: Path) -> JsonObject:
    """Reads a JSON object; see `parse_json`.

    Raises:
        ConfigError: no such file, not readable, not JSON (with line and column), or not an object.
    """
    try:
        content = read_json_text(path)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; give a folder with a config.json, or the file itself"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); expected a JSON text file") from None
    try:
        data = parse_json(content)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; correct it") from None
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}: found {type(data).__name__} at the top, expected a JSON object; correct the file"
        )
    return data


def read_json_text(path: Path) -> str:
    """The text of a file that is not trusted to be one: a pipe would never end, and a device neither.

    Raises:
        OSError: no such file, no regular file, not readable, or too large to be what it is said to be.
        UnicodeDecodeError: not UTF-8.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError("not a regular file")
    if status.st_size > _MOST_BYTES:
        raise OSError(f"{status.st_size} bytes, expected at most {_MOST_BYTES}")
    return path.read_text(encoding="utf-8")


def parse_json(text: str) -> Any:
    """Parses JSON from a file that is not trusted.

    Raises:
        ValueError: not JSON (with line and column), nested past Python's limit, a number longer than any size, or a
            key given twice in one object, which the standard reader lets pass.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_int=_whole_number)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno}: not valid JSON ({error.msg})") from None
    except RecursionError:
        raise ValueError("not valid JSON (nested too deep)") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> JsonObject:
    entries: JsonObject = {}
    for key, value in pairs:
        if key in entries:
            raise ValueError(f"{key}: given twice in one object, expected once")
        entries[key] = value
    return entries


def _whole_number(digits: str) -> int:
    if (
        len(digits) > _MOST_DIGITS
    ):  # thousands of them cost seconds, and Python refuses in words for programmers
        raise ValueError(
            f"{digits[:8]}...: a number of {len(digits)} digits, expected at most {_MOST_DIGITS}"
        )
    return int(digits)
