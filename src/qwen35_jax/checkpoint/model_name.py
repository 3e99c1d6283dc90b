"""What the name of a model means: the built-in model, a path, a published architecture or a hub id, in this order.

Imports no JAX, so that commands which only ask for shapes answer at once.
"""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from qwen35_jax.checkpoint.hub import download, is_hub_id
from qwen35_jax.checkpoint.index import has_weights
from qwen35_jax.config import ModelConfig, published
from qwen35_jax.errors import CheckpointError, ConfigError

BUILT_IN = "nano"


def find_model(source: str | Path) -> Path:
    """The local folder of a model with its weights, downloaded if need be.

    Args:
        source: "nano" for the built-in model, a folder in Hugging Face or Orbax layout, or a hub id. A name that could
            be several of these is the first.

    Raises:
        CheckpointError: it is none of these, or the download failed.
    """
    path = _local(str(source))
    if path is None:
        return _from_hub(str(source))
    if not path.is_dir():
        raise CheckpointError(
            f"'{source}': is a file; give the folder that holds config.json and the weights"
        )
    return path


def find_config(source: str | Path) -> ModelConfig:
    """The configuration of a model; no weights are read or downloaded.

    Args:
        source: as for `find_model`, or a `config.json` itself, or (after paths, before hub ids) the name of a published
            architecture, see `published`.

    Raises:
        ConfigError: the configuration is not valid.
        CheckpointError: there is none of that name, or the download failed.
    """
    path = _local(str(source))
    if path is not None:
        return ModelConfig.from_hf(path)
    try:
        return published(str(source))
    except ConfigError as error:
        unknown = error
    try:
        folder = _from_hub(str(source), wanted=["config.json"])
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {unknown}") from error
    return ModelConfig.from_hf(folder)


def _local(name: str) -> Path | None:
    """The built-in model's folder, or an existing file or folder of that name."""
    if name == BUILT_IN:
        folder = Path(str(importlib.resources.files("qwen35_jax") / BUILT_IN))
        if not has_weights(folder):
            raise CheckpointError(
                f"'{BUILT_IN}': the built-in model is not part of this installation; install it again"
            )
        return folder
    try:
        path = Path(name).expanduser()
    except RuntimeError:  # ~ of a user that there is not
        return None
    return path if name and path.exists() else None


def _from_hub(name: str, **options: list[str]) -> Path:
    if not is_hub_id(name):
        raise CheckpointError(
            f"'{name}': no such file or folder, and neither '{BUILT_IN}' nor a hub id (like Qwen/Qwen3.5-0.8B)"
        )
    try:
        return download(name, **options)
    except CheckpointError as error:
        raise CheckpointError(f"'{name}': no such file or folder, and as a hub id: {error}") from error
