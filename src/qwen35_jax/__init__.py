"""Qwen3.5, 3.6 and 3.8 in JAX.

    import qwen35_jax as qwen

    model = qwen.load("nano")
    print(qwen.generate(model, ["The capital of France"]).generations[0].text)

The names below are imported when first used, so that a program which only asks for shapes never waits for weights'
readers, and none of them waits for a tokenizer.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qwen35_jax.cache import Cache as Cache
    from qwen35_jax.cache import init_cache as init_cache
    from qwen35_jax.checkpoint import load as load
    from qwen35_jax.config import ModelConfig as ModelConfig
    from qwen35_jax.config import published as published
    from qwen35_jax.inference import GenerationSettings as GenerationSettings
    from qwen35_jax.inference import generate as generate
    from qwen35_jax.inference.engine import Engine as Engine
    from qwen35_jax.inference.engine import Request as Request
    from qwen35_jax.inference.speculation import Speculation as Speculation
    from qwen35_jax.model import abstract_model as abstract_model
    from qwen35_jax.model import decode_step as decode_step
    from qwen35_jax.model import forward as forward
    from qwen35_jax.model import init_model as init_model
    from qwen35_jax.model import prefill as prefill

_HOMES = {
    "Cache": "cache",
    "init_cache": "cache",
    "load": "checkpoint",
    "ModelConfig": "config",
    "published": "config",
    "GenerationSettings": "inference",
    "generate": "inference",
    "Engine": "inference.engine",
    "Request": "inference.engine",
    "Speculation": "inference.speculation",
    "abstract_model": "model",
    "decode_step": "model",
    "forward": "model",
    "init_model": "model",
    "prefill": "model",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"qwen35_jax.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'qwen35_jax' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
