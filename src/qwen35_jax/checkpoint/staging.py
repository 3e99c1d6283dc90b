"""Folders that appear complete or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from qwen35_jax.errors import CheckpointError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def staged_folder(destination: Path, *, nbytes: int) -> Iterator[Path]:
    """A new folder to write into, renamed to `destination` when the block ends without an error.

    It lies beside the destination under a hidden name. An error removes it; a killed process leaves it
    behind, and never a destination that looks complete.

    Args:
        destination: must not exist, or be an empty folder. Folders above it are made.
        nbytes: about what will be written, to refuse before starting where the disk has less left.

    Raises:
        CheckpointError: the destination is in use, or the disk is (or gets) full.
    """
    destination = check_destination(destination)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(destination.parent).free
        if free < nbytes:
            raise CheckpointError(
                f"{destination}: needs {nbytes / 1e6:,.1f} MB, but only {free / 1e6:,.1f} MB are free on that disk"
            )
        staging = destination.with_name(f".{destination.name[:60]}.partial-{os.getpid()}")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
    except OSError as error:
        raise CheckpointError(f"{destination}: cannot be made: {error.strerror}") from error
    try:
        yield staging
        os.rename(staging, destination)
    except BaseException as error:
        _remove(staging)
        if _is_out_of_space(error):
            raise CheckpointError(f"{destination}: the disk is full; nothing was written") from error
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{destination}: cannot be written: {error.strerror}; nothing was written"
            ) from error
        raise


def _remove(folder: Path) -> None:
    """Removes a folder into which threads of a failed write may still be writing for a moment."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)


def check_destination(destination: Path) -> Path:
    """The place of a folder to be made, with links followed.

    Raises:
        CheckpointError: something is there already, or no folder can be there.
    """
    try:
        real = destination.resolve()
        if real.is_symlink():  # newer Pythons give up on a circle of links without a word
            raise CheckpointError(f"{destination}: cannot be made: its links lead in a circle")
        if real.is_dir() and any(real.iterdir()):
            raise CheckpointError(
                f"{destination}: exists and is not empty; remove it or choose another folder"
            )
        if real.exists() and not real.is_dir():
            raise CheckpointError(f"{destination}: is a file, expected a folder to be made")
        above = next(folder for folder in real.parents if folder.exists())
        if not above.is_dir():
            raise CheckpointError(f"{destination}: cannot be made, since {above} is a file")
    except CheckpointError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, a circle of links, a null byte
        raise CheckpointError(f"{destination}: cannot be made: {error}") from error
    if real.is_mount():
        raise CheckpointError(
            f"{destination}: is where a disk is mounted, and cannot be replaced; choose a folder in it"
        )
    return real


def _is_out_of_space(error: BaseException) -> bool:
    """Whether writing failed for want of space; TensorStore tells so only in the text of a ValueError."""
    if isinstance(error, OSError):
        return error.errno in _NO_SPACE
    return isinstance(error, ValueError) and os.strerror(errno.ENOSPC) in str(error)
