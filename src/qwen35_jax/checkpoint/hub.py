"""Downloads from the Hugging Face hub, or a server that speaks its protocol."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from qwen35_jax.checkpoint.companions import COMPANIONS
from qwen35_jax.errors import CheckpointError

WANTED = (*COMPANIONS, "*.safetensors")
"""What is downloaded: the weights and the small files beside them. Never code, never pickled weights."""

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def is_hub_id(text: str) -> bool:
    """Whether a text has the shape of a hub id, such as `Qwen/Qwen3.5-0.8B`."""
    return _ID.fullmatch(text) is not None and ".." not in text and "--" not in text


def download(hub_id: str, *, wanted: Sequence[str] = WANTED) -> Path:
    """The folder of a model in the local cache, after downloading what is missing of it.

    Args:
        hub_id: such as "Qwen/Qwen3.5-0.8B".
        wanted: patterns of the files to download.

    `HF_ENDPOINT`, `HF_HUB_OFFLINE`, `HF_HOME` and `HF_TOKEN` work as for every user of `huggingface_hub`.

    Raises:
        CheckpointError: the model does not exist, is gated, or cannot be reached and is not in the cache.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    where = f"'{hub_id}' on {constants.ENDPOINT}"
    try:
        folder = snapshot_download(hub_id, allow_patterns=list(wanted), ignore_patterns=["*/*"])
    except GatedRepoError as error:
        raise CheckpointError(f"{where}: is gated; accept its terms there and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{where}: no such model (or a private one); check the name, or set HF_TOKEN"
        ) from error
    except HFValidationError as error:
        raise CheckpointError(f"'{hub_id}': is not a valid hub id ({error})") from error
    except LocalEntryNotFoundError as error:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "there is no connection"
        raise CheckpointError(
            f"{where}: is not in the local cache, and {reason}; download it first, or give a folder"
        ) from error
    except Exception as error:  # the library's own errors and those of its HTTP client have no common base
        raise CheckpointError(f"{where}: cannot be downloaded: {error}") from error
    return Path(folder)
