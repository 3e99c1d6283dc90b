"""The published architectures, by name: `configs/*.json`."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from pathlib import Path

from qwen35_jax.config.json_file import JsonObject, load_json
from qwen35_jax.config.model import ModelConfig
from qwen35_jax.errors import ConfigError

PUBLISHER = "qwen/"


def published(name: str) -> ModelConfig:
    """The configuration of a published model, without looking at the network.

    Args:
        name: as on the hub, in any case, with or without the publisher: "Qwen/Qwen3.8-27B", "qwen3.5-0.8b".

    Raises:
        ConfigError: no published architecture of that name is known; the message lists those that are.
    """
    known = _by_name()
    path = known.get(name.casefold().removeprefix(PUBLISHER))
    if path is None:
        names = published_names()
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else "name one of those"
        raise ConfigError(f"model name: found {name!r}, expected {', '.join(names)}; {hint}")
    return ModelConfig.from_hf(_without_notes(load_json(path)))


def published_names() -> tuple[str, ...]:
    """Names that `published` knows, as on the hub."""
    names = (name for path in _files() for name in load_json(path)["_names"])
    return tuple(sorted(f"Qwen/{name}" for name in names))


def published_source(name: str) -> str:
    """Where the values of a published architecture come from."""
    return load_json(_by_name()[name.casefold().removeprefix(PUBLISHER)])["_source"]


@functools.cache
def _by_name() -> Mapping[str, Path]:
    return {name.casefold(): path for path in _files() for name in load_json(path)["_names"]}


def _files() -> list[Path]:
    return sorted(_folder().glob("*.json"))


def _folder() -> Path:
    """`configs/`: inside an installed package, and at the top of a checkout (an editable install)."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parents[1] / "configs"


def _without_notes(data: JsonObject) -> JsonObject:
    return {key: value for key, value in data.items() if not key.startswith("_")}
