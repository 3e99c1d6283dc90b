"""What can be known about prompts and settings without the weights, checked before anything is compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from qwen35_jax.config import TextConfig
from qwen35_jax.errors import PromptError
from qwen35_jax.inference.settings import DEFAULT_NEW_TOKENS, GenerationSettings
from qwen35_jax.inference.tokenizer import Tokenizer, check_token_ids

Prompt = str | Sequence[int]


def check_prompts(
    prompts: Sequence[Prompt],
    settings: GenerationSettings | Sequence[GenerationSettings] | None,
    config: TextConfig,
    tokenizer: Tokenizer | None = None,
) -> tuple[list[list[int]], list[GenerationSettings]]:
    """Everything that `generate` can know about its input without the weights; arguments as there.

    Returns:
        Each row's prompt as token ids, and its settings with `max_new_tokens` filled in.

    Raises:
        PromptError: see `generate`.
    """
    checked = [
        check_prompt(
            f"prompt {row}",
            prompt,
            wanted,
            vocab_size=config.vocab_size,
            context=config.max_context,
            whose="the model's context",
            tokenizer=tokenizer,
        )
        for row, (prompt, wanted) in enumerate(as_rows(prompts, settings))
    ]
    return [ids for ids, _ in checked], [wanted for _, wanted in checked]


def check_prompt(
    name: str,
    prompt: Prompt,
    wanted: GenerationSettings,
    *,
    vocab_size: int,
    context: int,
    whose: str,
    tokenizer: Tokenizer | None,
) -> tuple[list[int], GenerationSettings]:
    """One prompt as token ids, and its settings with `max_new_tokens` filled in.

    Args:
        name: what to call the prompt in an error.
        prompt: text or token ids.
        wanted: its settings.
        vocab_size: of the model.
        context: tokens that there is room for, prompt and answer together.
        whose: what to call that room in an error.
        tokenizer: reads a text.

    Raises:
        PromptError: see `generate`.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise PromptError(f"{name} is a text, and there is no tokenizer to read it")
        prompt = tokenizer.encode(prompt)
    if not isinstance(prompt, Iterable):
        raise PromptError(
            f"{name} is {prompt!r}, expected a text or a list of token ids: "
            "a single prompt goes into a list of its own, as in [[5, 17, 3]]"
        )
    ids = check_token_ids(prompt, vocab_size)
    if not ids:
        raise PromptError(f"{name} is empty: give at least one token to continue from")
    unknown = [token for token in wanted.logit_bias if token >= vocab_size]
    if unknown:
        raise PromptError(f"logit_bias names token {unknown[0]}, expected ids from 0 to {vocab_size - 1}")
    room = context - len(ids)
    if room <= 0:
        raise PromptError(
            f"{name} has {len(ids)} tokens, which leaves no room to answer in {whose} of {context} tokens: "
            "shorten the prompt"
        )
    new = wanted.max_new_tokens or max(min(DEFAULT_NEW_TOKENS, room), wanted.min_new_tokens)
    if new > room:
        raise PromptError(
            f"{name} has {len(ids)} tokens and {new} more are asked for, but {whose} is {context} tokens: "
            f"ask for at most {room} or shorten the prompt"
        )
    return ids, dataclasses.replace(wanted, max_new_tokens=new)


def as_rows(
    prompts: Sequence[Prompt], settings: GenerationSettings | Sequence[GenerationSettings] | None
) -> list[tuple[Prompt, GenerationSettings]]:
    """Each prompt with its settings; arguments as for `generate`."""
    if isinstance(prompts, str) or not len(prompts):
        raise PromptError(f"prompts is {prompts!r}, expected a list of at least one prompt")
    if settings is None or isinstance(settings, GenerationSettings):
        settings = [settings or GenerationSettings()] * len(prompts)
    if not isinstance(settings, Sequence) or not all(isinstance(s, GenerationSettings) for s in settings):
        raise PromptError(
            f"settings is {settings!r}, expected GenerationSettings, for all prompts or one for each"
        )
    if len(settings) != len(prompts):
        raise PromptError(f"settings holds {len(settings)} entries, expected one per prompt ({len(prompts)})")
    return list(zip(prompts, settings, strict=True))
