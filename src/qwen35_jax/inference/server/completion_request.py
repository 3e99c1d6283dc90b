"""A request to continue texts, read field by field into what the engine runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from qwen35_jax.errors import PromptError
from qwen35_jax.inference.engine import Request
from qwen35_jax.inference.server.api_error import field_error, shown
from qwen35_jax.inference.server.fields import Fields
from qwen35_jax.inference.server.sampling_fields import (
    IGNORED,
    Delivery,
    read_delivery,
    read_max_tokens,
    read_settings,
    refuse_endless,
    seeded,
    with_length,
)
from qwen35_jax.inference.server.served_model import ServedModel
from qwen35_jax.inference.settings import MOST_LOGPROBS
from qwen35_jax.inference.tokenizer import check_token_ids

DEFAULT_TOKENS = 16
"""Of an answer for which nothing is asked, as the API has it."""

MOST_PROMPTS = 128
_REFUSED = {"suffix": "asks for a text between two others, which is not done here"}


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """What a client wants continued.

    Attributes:
        requests: one per choice, those of one prompt together.
        delivery: how the answers reach the client.
        echoes: by choice, what its text begins with: the prompt, or nothing.
        top_logprobs: see `GenerationSettings`.
    """

    requests: tuple[Request, ...]
    delivery: Delivery
    echoes: tuple[str, ...]
    top_logprobs: int | None


def read_completion_request(
    content: Mapping[str, Any], served: ServedModel, context: int
) -> CompletionRequest:
    """Reads and checks a request; arguments and errors as for `read_chat_request`.

    Names of special tokens in a prompt stand for these tokens: this is the endpoint for prompts that are complete.
    """
    fields = Fields(content)
    fields.value("model")
    prompts = _prompts(fields, served, context)
    delivery = read_delivery(fields)
    most = read_max_tokens(fields)
    top_logprobs = fields.integer("logprobs", 0, MOST_LOGPROBS)
    echo = fields.boolean("echo")
    if echo and top_logprobs is not None:
        raise field_error("echo", "is given with logprobs, and those of prompts are not told here")
    best_of = fields.integer("best_of", 1, delivery.choices)
    if best_of is not None and best_of != delivery.choices:
        raise field_error("best_of", f"is {best_of}, expected n, which is {delivery.choices}")
    settings = dataclasses.replace(
        read_settings(fields, served.defaults, served.config.vocab_size), top_logprobs=top_logprobs
    )
    fields.refuse(_REFUSED, harmless=("",))
    fields.refuse_unread(ignored=IGNORED)
    stop_ids = () if settings.ignore_eos else served.stop_ids
    requests, echoes = [], []
    for tokens in prompts:
        fitting = with_length(
            settings,
            prompt="prompt",
            prompt_length=len(tokens),
            context=context,
            most=most,
            default=DEFAULT_TOKENS,
        )
        shown_prompt = served.tokenizer.decode(tokens, skip_special_tokens=False) if echo else ""
        for choice in range(delivery.choices):
            requests.append(Request(tuple(tokens), seeded(fitting, choice), stop_ids))
            echoes.append(shown_prompt)
    return CompletionRequest(tuple(requests), delivery, tuple(echoes), top_logprobs)


def _prompts(fields: Fields, served: ServedModel, context: int) -> list[list[int]]:
    """The prompts as token ids: a string, a list of strings, a list of ids, or a list of such lists."""
    value = fields.value("prompt")
    if value is None:
        raise field_error("prompt", "is missing", code="missing_required_parameter")
    if isinstance(value, str):
        return [_tokens(value, "prompt", served, context)]
    if not isinstance(value, list):
        raise field_error(
            "prompt", f"is {shown(value)}, expected a string or a list of strings or of token ids"
        )
    if not value:
        raise field_error("prompt", "is empty")
    if not isinstance(value[0], str | list):
        return [_tokens(value, "prompt", served, context)]
    if len(value) > MOST_PROMPTS:
        raise field_error("prompt", f"holds {len(value)} prompts, expected at most {MOST_PROMPTS}")
    return [_tokens(prompt, f"prompt[{index}]", served, context) for index, prompt in enumerate(value)]


def _tokens(prompt: str | Sequence[Any], field: str, served: ServedModel, context: int) -> list[int]:
    if isinstance(prompt, str):
        refuse_endless(field, served.token_texts.fewest_for(prompt), context)
        tokens = served.tokenizer.encode(prompt)
    elif isinstance(prompt, list):
        for token in prompt:
            if not isinstance(token, int) or isinstance(token, bool):
                raise field_error(field, f"holds {shown(token)}, expected token ids")
        try:
            tokens = check_token_ids(prompt, served.config.vocab_size)
        except PromptError as error:
            raise field_error(field, f"cannot be taken: {error}") from error
    else:
        raise field_error(field, f"is {shown(prompt)}, expected a string or a list of token ids")
    if not tokens:
        raise field_error(field, "is empty: give at least one token to continue from")
    return tokens
