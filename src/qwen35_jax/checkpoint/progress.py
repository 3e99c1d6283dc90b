"""How long operations on checkpoints tell how far they are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

Advance = Callable[[int], None]
"""Called with a number of bytes that have just been dealt with."""

Progress = Callable[[str, int], AbstractContextManager[Advance]]
"""Called with what is being done and its bytes in all; gives an `Advance` for the duration."""


def quiet(title: str, nbytes: int) -> AbstractContextManager[Advance]:
    """The default `Progress`: says nothing."""
    return contextlib.nullcontext(lambda count: None)


@contextlib.contextmanager
def progress_bar(title: str, nbytes: int) -> Iterator[Advance]:
    """A bar on standard error with bytes, speed and time left."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=nbytes)
        yield lambda count: bar.update(task, advance=count)
