"""What a reply asks of each of its choices, whether it is a chat's or a completion's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from qwen35_jax.inference.results import FinishReason, Generation, TokenEvent

JSON = dict[str, Any]


class Choice(Protocol):
    """One of the answers of a reply, while it grows.

    Attributes:
        satisfied: nothing more is wanted of it, and the engine may stop.
        reasoning_tokens: of the tokens so far, those of thoughts.
    """

    satisfied: bool
    reasoning_tokens: int

    def opening(self) -> list[JSON]:
        """What a stream tells of it before anything is drawn."""
        ...

    def take(self, event: TokenEvent) -> None:
        """Takes the next token."""
        ...

    def end(self, reason: FinishReason) -> None:
        """Takes the end of the answer."""
        ...

    def released(self) -> list[JSON]:
        """What a stream tells of it now: all that has come since the last call."""
        ...

    def whole(self) -> JSON:
        """What a reply that is no stream tells of it."""
        ...


def usage(choices: Sequence[Choice], generations: Sequence[Generation], choices_per_prompt: int) -> JSON:
    """The numbers of tokens of a reply. Each prompt counts once, however many choices it has.

    Args:
        choices: of the reply, those of one prompt together.
        generations: theirs.
        choices_per_prompt: how many that are.
    """
    prompts = generations[::choices_per_prompt]
    prompt = sum(len(generation.prompt_tokens) for generation in prompts)
    completion = sum(len(generation.tokens) for generation in generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(generation.cached_tokens for generation in prompts)},
        "completion_tokens_details": {"reasoning_tokens": sum(choice.reasoning_tokens for choice in choices)},
    }
