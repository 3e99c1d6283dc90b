"""The small files that belong to a model beside its weights, and how they travel with them."""

from __future__ import annotations

import fnmatch
import shutil
from pathlib import Path

from qwen35_jax.checkpoint.links import check_stays_inside
from qwen35_jax.errors import CheckpointError

COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.md", "LICENSE*", "NOTICE*")
"""Settings, tokenizer, chat template, image processor, model card, license. Never code, never pickled weights."""

LAYOUT_FILE = "source_layout.json"
"""File of an Orbax folder that says how the Hugging Face checkpoint looked that it came from."""

_DESCRIBE_WEIGHTS = ("*.index.json", LAYOUT_FILE)  # made anew by whoever writes the weights


def copy_companions(source: Path, destination: Path) -> None:
    """Copy the files of a folder that travel with its weights, except what is already at the destination.

    Subfolders and all other files stay behind.

    Raises:
        CheckpointError: the folder cannot be read, or a file is a link that leaves it: what a model folder from
            elsewhere points to on this machine must not end up in a copy.
    """
    try:
        paths = sorted(source.iterdir())
    except OSError as error:
        raise CheckpointError(f"{source}: cannot be read: {error.strerror}") from error
    for path in paths:
        if _is_companion(path.name) and path.is_file() and not (destination / path.name).exists():
            check_stays_inside(source, path)
            shutil.copyfile(path, destination / path.name)


def _is_companion(name: str) -> bool:
    def matches(patterns: tuple[str, ...]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    return matches(COMPANIONS) and not matches(_DESCRIBE_WEIGHTS)
