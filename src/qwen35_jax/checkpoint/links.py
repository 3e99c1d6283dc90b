"""Links in a model's folder: a folder that came from elsewhere must not reach into the rest of this machine."""

from __future__ import annotations

from pathlib import Path

from qwen35_jax.errors import CheckpointError


def check_stays_inside(folder: Path, path: Path) -> None:
    """Make sure without opening it that a file of a folder is not a link to somewhere else.

    The cache of the Hugging Face hub stores a snapshot's files as links into a `blobs` folder beside it; such
    links are followed, and no others that leave the folder.

    Args:
        folder: of the model.
        path: of a file in it; none needs to be there.

    Raises:
        CheckpointError: the link leaves the folder, or leads in a circle.
    """
    real_folder = folder.resolve()
    try:
        target = path.resolve()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: cannot be followed: {error}") from error
    allowed = [real_folder]
    if real_folder.parent.name == "snapshots":
        allowed.append(real_folder.parent.parent / "blobs")
    if not any(target.is_relative_to(root) for root in allowed):
        raise CheckpointError(
            f"{path}: is a link to {target}, outside the model's folder; refused, put the file itself there"
        )
