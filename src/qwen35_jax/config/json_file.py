"""Strict reading of a JSON file, with errors that say where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qwen35_jax.errors import ConfigError

JsonObject = dict[str, Any]


def load_json(path: Path) -> JsonObject:
    """Reads a JSON object, refusing what the standard reader lets pass: a key given twice.

    Raises:
        ConfigError: no such file, not readable, not JSON (with line and column), or not an object.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; give a folder with a config.json, or the file itself"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); expected a JSON text file") from None
    try:
        data = json.loads(content, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}: line {error.lineno}, column {error.colno}: not valid JSON ({error.msg}); correct it"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}: found {type(data).__name__} at the top, expected a JSON object; correct the file"
        )
    return data


def _unique_keys(pairs: list[tuple[str, Any]]) -> JsonObject:
    entries: JsonObject = {}
    for key, value in pairs:
        if key in entries:
            raise ConfigError(f"{key}: given twice in one object, expected once; remove one of the two")
        entries[key] = value
    return entries
