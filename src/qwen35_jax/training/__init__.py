"""Fine-tuning: data, losses, optimizers, and the trainer that puts them together.

The names below are imported when first used: the trainer needs the `train` extra, its parts do not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qwen35_jax.training.settings import TrainingSettings as TrainingSettings
    from qwen35_jax.training.settings import read_settings as read_settings
    from qwen35_jax.training.trainer import Trainer as Trainer

_HOMES = {"Trainer": "trainer", "TrainingSettings": "settings", "read_settings": "settings"}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
