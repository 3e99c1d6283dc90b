"""Checkpoints: Hugging Face layout read and written, Orbax folders, and downloads from the hub.

The names below are imported when first used: what a model is called can be asked without waiting for JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qwen35_jax.checkpoint.export import export_hf as export_hf
    from qwen35_jax.checkpoint.hf import KeptTensors as KeptTensors
    from qwen35_jax.checkpoint.hf import load_hf as load_hf
    from qwen35_jax.checkpoint.source import LoadedModel as LoadedModel
    from qwen35_jax.checkpoint.source import load as load

_HOMES = {
    "KeptTensors": "hf",
    "LoadedModel": "source",
    "export_hf": "export",
    "load": "source",
    "load_hf": "hf",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
