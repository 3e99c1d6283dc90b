"""What running a model asks of it."""

from __future__ import annotations

import os
from typing import Protocol

from flax import nnx

from qwen35_jax.config import ModelConfig
from qwen35_jax.model import Parameters


class RunnableModel(Protocol):
    """A model with its parameters, as `qwen35_jax.checkpoint.load` returns it."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def graphdef(self) -> nnx.GraphDef: ...
    @property
    def parameters(self) -> Parameters: ...
    @property
    def folder(self) -> str | os.PathLike[str] | None: ...
