"""The published architectures, by name: `configs/*.json`."""

from __future__ import annotations

import difflib
import functools
from pathlib import Path

from qwen35_jax.config.json_file import load_json
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
    data = load_json(_file_of(name))
    return ModelConfig.from_hf({key: value for key, value in data.items() if not key.startswith("_")})


def published_names() -> tuple[str, ...]:
    """Names that `published` knows, as on the hub."""
    return tuple(sorted(f"Qwen/{name}" for names, _ in _files() for name in names))


def _file_of(name: str) -> Path:
    wanted = name.casefold().removeprefix(PUBLISHER)
    for names, path in _files():
        if wanted in (known.casefold() for known in names):
            return path
    known = published_names()
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"those known are {', '.join(known)}"
    raise ConfigError(f"no published model of the name {name!r}; {hint}")


@functools.cache
def _files() -> list[tuple[list[str], Path]]:
    """Every file of a published architecture, with the names of its models."""
    paths = sorted(_folder().glob("*.json"))
    return [(load_json(path).get("_names", []), path) for path in paths]


def _folder() -> Path:
    """`configs/`: inside an installed package, and at the top of a checkout (an editable install)."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parents[1] / "configs"
