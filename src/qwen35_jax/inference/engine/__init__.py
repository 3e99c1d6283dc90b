"""Many requests at once on one model: slots, a queue, and streams of tokens."""

from qwen35_jax.inference.engine.engine import Engine, EngineStatistics
from qwen35_jax.inference.engine.request import AnswerStream, Request

__all__ = ["AnswerStream", "Engine", "EngineStatistics", "Request"]
