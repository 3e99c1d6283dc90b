"""Generating text with a loaded model.

Example:
    model = qwen35_jax.load("nano")
    result = generate(model, ["The capital of France"], GenerationSettings(max_new_tokens=16))
    print(result.generations[0].text)
"""

from qwen35_jax.inference.chat_template import ChatTemplate, encode_chat
from qwen35_jax.inference.generation import generate
from qwen35_jax.inference.results import Generation, GenerationResult, Timing, TokenEvent
from qwen35_jax.inference.settings import GenerationSettings
from qwen35_jax.inference.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "Generation",
    "GenerationResult",
    "GenerationSettings",
    "Timing",
    "TokenEvent",
    "Tokenizer",
    "encode_chat",
    "generate",
]
