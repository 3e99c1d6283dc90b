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


def companions_of(folder: Path) -> list[Path]:
    """The files of a folder that travel with its weights; subfolders and all other files do not.

    Raises:
        CheckpointError: the folder cannot be read, or a file is a link that leaves it: what a model folder from
            elsewhere points to on this machine must not end up in a copy.
    """
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror}") from error
    found = [
        path
        for path in paths
        if any(fnmatch.fnmatchcase(path.name, pattern) for pattern in COMPANIONS)
        and not any(fnmatch.fnmatchcase(path.name, pattern) for pattern in _DESCRIBE_WEIGHTS)
        and path.is_file()
    ]
    for path in found:
        check_stays_inside(folder, path)
    return found


def copy_companions(source: Path, destination: Path) -> None:
    """Copy the companions of one folder into another, except what is already there. Errors as `companions_of`."""
    for path in companions_of(source):
        if not (destination / path.name).exists():
            shutil.copyfile(path, destination / path.name)
