"""How an answer is drawn, from the fields that chats and completions share."""

from __future__ import annotations

import dataclasses

from qwen35_jax.errors import PromptError
from qwen35_jax.inference.server.api_error import field_error, shown
from qwen35_jax.inference.server.fields import Fields
from qwen35_jax.inference.settings import GenerationSettings

MOST_STOPS = 4
LONGEST_STOP = 500
MOST_CHOICES = 128

IGNORED = (
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
"""Fields of the API that ask for bookkeeping or speed, and change no answer."""

_LEAST_TOP_P = 1e-30
"""Less than any probability, and still a number where they are computed: whatever is below it means the same."""

_NUMBERS: dict[str, tuple[float, float, str]] = {
    "temperature": (0, 2, "a number from 0 (greedy) to 2"),
    "top_p": (_LEAST_TOP_P, 1, "a number above 0 and at most 1"),
    "min_p": (0, 1, "a number from 0 to 1"),
    "repetition_penalty": (0.01, 100, "a number from 0.01 to 100"),
    "presence_penalty": (-2, 2, "a number from -2 to 2"),
    "frequency_penalty": (-2, 2, "a number from -2 to 2"),
}
"""Ranges of the API, where it has them. Far beyond, logits would leave the range of floating point numbers."""

_MOST_BIAS = 100
_MOST_TOKENS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Delivery:
    """How answers reach the client.

    Attributes:
        stream: piece by piece.
        include_usage: with the numbers of tokens at the end of the stream.
        choices: answers to each prompt.
    """

    stream: bool
    include_usage: bool
    choices: int


def read_delivery(fields: Fields) -> Delivery:
    """`stream`, `stream_options` and `n`."""
    stream = fields.boolean("stream")
    include_usage = False
    options = fields.inner("stream_options")
    if options is not None:
        if not stream:
            raise field_error("stream_options", "is given, and stream is not true")
        include_usage = options.boolean("include_usage")
        options.refuse_unread(ignored=("include_obfuscation",))
    return Delivery(stream, include_usage, fields.integer("n", 1, MOST_CHOICES) or 1)


def read_max_tokens(fields: Fields) -> tuple[str, int | None]:
    """The most tokens that an answer may have, by the field that tells it."""
    old = fields.integer("max_tokens", 1, _MOST_TOKENS)
    new = fields.integer("max_completion_tokens", 1, _MOST_TOKENS)
    if old is not None and new is not None and old != new:
        raise field_error("max_tokens", f"is {old}, and max_completion_tokens is {new}: give one of them")
    return ("max_tokens", old) if new is None else ("max_completion_tokens", new)


def read_settings(fields: Fields, defaults: GenerationSettings, vocabulary_size: int) -> GenerationSettings:
    """The settings of an answer, its length and log-probabilities aside.

    Args:
        fields: of the request.
        defaults: for what is not given.
        vocabulary_size: of the model.

    Raises:
        ApiError: a field is of a wrong type or out of range.
    """
    given: dict[str, float] = {}
    for name, (least, most, expected) in _NUMBERS.items():
        value = fields.number(name)
        if value is None:
            continue
        if name == "top_p" and value > 0:
            value = max(value, _LEAST_TOP_P)
        if not least <= value <= most:
            raise field_error(name, f"is {shown(value)}, expected {expected}")
        given[name] = value
    top_k = fields.integer("top_k", -1, _MOST_TOKENS)
    if top_k is not None:
        given["top_k"] = max(top_k, 0)  # -1 says that it is off, to other servers
    seed = fields.integer("seed", -(2**63), 2**64 - 1)
    if seed is not None:
        given["seed"] = seed % 2**32
    least_tokens = fields.integer("min_tokens", 0, _MOST_TOKENS)
    if least_tokens is not None:
        given["min_new_tokens"] = least_tokens
    return dataclasses.replace(
        defaults,
        **given,
        ignore_eos=fields.boolean("ignore_eos"),
        stop=_stop(fields),
        logit_bias=_logit_bias(fields, vocabulary_size),
    )


def refuse_endless(prompt: str, fewest: int, context: int) -> None:
    """Refuses a prompt that cannot fit, before it is made into tokens: that holds up everyone else for seconds.

    Args:
        prompt: field that it came from.
        fewest: tokens that it takes at least.
        context: tokens that there is room for, prompt and answer together.

    Raises:
        ApiError: it does not fit.
    """
    if fewest >= context:
        raise field_error(
            prompt,
            f"has at least {fewest} tokens, and this server's context is {context} tokens for prompt and answer "
            "together: shorten it",
            code="context_length_exceeded",
        )


def with_length(
    settings: GenerationSettings,
    *,
    prompt: str,
    prompt_length: int,
    context: int,
    most: tuple[str, int | None],
    default: int | None,
) -> GenerationSettings:
    """The settings with the number of tokens that the answer may have.

    Args:
        settings: without it.
        prompt: field that the prompt came from.
        prompt_length: in tokens.
        context: tokens that there is room for, prompt and answer together.
        most: what is asked for, and by which field.
        default: where nothing is asked for; None takes all the room.

    Raises:
        ApiError: there is no room for that.
    """
    field, wanted = most
    room = context - prompt_length
    if room <= 0:
        raise field_error(
            prompt,
            f"has {prompt_length} tokens, and this server's context is {context} tokens for prompt and answer "
            "together: shorten it",
            code="context_length_exceeded",
        )
    if wanted is not None and wanted > room:
        raise field_error(
            field,
            f"is {wanted}, and beside the {prompt_length} tokens of {prompt} this server's context of {context} tokens "
            f"has room for {room}: ask for at most that",
            code="context_length_exceeded",
        )
    length = wanted or min(default or room, room)
    if settings.min_new_tokens > length:
        raise field_error(
            "min_tokens", f"is {settings.min_new_tokens}, more than the {length} tokens there may be"
        )
    return dataclasses.replace(settings, max_new_tokens=length)


def seeded(settings: GenerationSettings, choice: int) -> GenerationSettings:
    """The settings of one of several choices: a seed counts on from one to the next, so that they differ."""
    if settings.seed is None or not choice:
        return settings
    return dataclasses.replace(settings, seed=(settings.seed + choice) % 2**32)


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.value("stop")
    stops = [] if value is None else [value] if isinstance(value, str) else value
    expected = f"expected a string of 1 to {LONGEST_STOP} characters, or a list of at most {MOST_STOPS} such"
    if not isinstance(stops, list) or len(stops) > MOST_STOPS:
        raise field_error("stop", f"is {shown(value)}, {expected}")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= LONGEST_STOP:
            raise field_error("stop", f"holds {shown(stop)}, {expected}")
    return tuple(stops)


def _logit_bias(fields: Fields, vocabulary_size: int) -> dict[int, float]:
    bias = fields.mapping("logit_bias") or {}
    found = {}
    for key, value in bias.items():
        if not key.isascii() or not key.isdecimal() or int(key[:20]) >= vocabulary_size:
            raise field_error(
                "logit_bias", f"names token {shown(key)}, expected ids from 0 to {vocabulary_size - 1}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise field_error("logit_bias", f"of token {key} is {shown(value)}, expected a number")
        if not -_MOST_BIAS <= value <= _MOST_BIAS:
            raise field_error(
                "logit_bias", f"of token {key} is {shown(value)}, expected -{_MOST_BIAS} to {_MOST_BIAS}"
            )
        found[int(key)] = value
    try:
        GenerationSettings(logit_bias=found)
    except PromptError as error:
        raise field_error("logit_bias", f"cannot be taken: {error}") from error
    return found
