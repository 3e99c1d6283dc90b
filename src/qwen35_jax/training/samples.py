"""What a model answers while it is trained, so that one can read what the loss does not tell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qwen35_jax.config import ModelConfig
from qwen35_jax.errors import PromptError
from qwen35_jax.inference.chat_template import ChatTemplate, encode_chat
from qwen35_jax.inference.generation import generate
from qwen35_jax.inference.prompts import check_prompts
from qwen35_jax.inference.runnable import RunnableModel
from qwen35_jax.inference.settings import GenerationSettings
from qwen35_jax.inference.tokenizer import Tokenizer


def encode_questions(
    questions: Sequence[str], folder: Path, config: ModelConfig, settings: GenerationSettings
) -> list[list[int]]:
    """The prompts of questions: a user's turn each, or for a model without a chat template the text itself.

    Args:
        questions: any texts that are not empty.
        folder: of the model, with its tokenizer.
        config: of the model.
        settings: of the answers.

    Raises:
        PromptError: a question is empty, or too long together with its answer.
    """
    tokenizer = Tokenizer.from_folder(folder)
    try:
        template = ChatTemplate.from_folder(folder)
    except PromptError:  # a model that was never taught to chat
        prompts = [tokenizer.encode(question) for question in questions]
    else:
        prompts = [
            encode_chat(template, tokenizer, [{"role": "user", "content": question}])
            for question in questions
        ]
    return check_prompts(prompts, settings, config.text, tokenizer)[0]


def sampled_answers(
    model: RunnableModel, prompts: Sequence[Sequence[int]], settings: GenerationSettings
) -> list[str]:
    """The answers of a model, all in one batch; prompts are from `encode_questions`."""
    result = generate(model, [list(prompt) for prompt in prompts], settings)
    return [answer.text or "" for answer in result.generations]
