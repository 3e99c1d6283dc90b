"""Many requests at once on one model: slots, a queue, and streams of tokens."""

from qwen35_jax.inference.engine.engine import Engine
from qwen35_jax.inference.engine.request import AnswerStream, Request
from qwen35_jax.inference.engine.statistics import EngineStatistics

__all__ = ["AnswerStream", "Engine", "EngineStatistics", "Request"]
