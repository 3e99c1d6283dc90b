"""What a caller may ask of a generation, checked before anything is compiled."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qwen35_jax.errors import CheckpointError, PromptError
from qwen35_jax.inference.stop_tokens import GENERATION_CONFIG
from qwen35_jax.inference.tokenizer import read_json_object

DEFAULT_NEW_TOKENS = 128
MOST_LOGPROBS = 20
MOST_BIASES = 300


@dataclasses.dataclass(frozen=True)
class GenerationSettings:
    """How one prompt is continued. The defaults are greedy decoding.

    Numbers may be NumPy's; they are kept as Python's.

    Attributes:
        max_new_tokens: tokens to generate at most. None means 128, or what the context leaves if that is less.
        min_new_tokens: the stop ids cannot be drawn before this many tokens.
        temperature: divides the logits before a draw; below 1e-5 the most likely token is taken (greedy).
        top_k: draw among the k most likely tokens (and those tied with the k-th); 0 leaves all.
        top_p: draw among the fewest most likely tokens whose probabilities sum to at least this; in (0, 1].
        min_p: drop tokens less likely than this fraction of the most likely one; in [0, 1].
        repetition_penalty: logits of tokens in the prompt or the answer are divided by this where positive and
            multiplied where negative (Keskar et al. 2019, section 4.1); 1 leaves them.
        presence_penalty: subtracted once from the logits of tokens already in the answer.
        seed: fixes the draws, in [0, 2**32). None draws one and reports it. A row's draws depend on its own
            seed alone, so two rows with the same prompt and seed agree.
        stop: strings that end the answer; they and what follows are left out of the text.
        ignore_eos: go on after stop ids, up to `max_new_tokens`.
        top_logprobs: tell the log-probability of every token drawn, and of so many of the most likely ones, 20 at
            most; None tells none. They are the model's own, before bias, penalties, temperature and truncation.
        frequency_penalty: subtracted as often as the token stands in the answer.
        logit_bias: token ids with numbers that are added to their logits before anything else, 300 at most.

    Raises:
        PromptError: a field is of a wrong type or out of range.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, (least, most, may_be_none) in _INTEGERS.items():
            value = getattr(self, name)
            if not (value is None and may_be_none):
                object.__setattr__(self, name, _integer(name, value, least, most))
        for name, (expected, holds) in _NUMBERS.items():
            object.__setattr__(self, name, _number(name, getattr(self, name), expected, holds))
        if not isinstance(self.stop, list | tuple) or not all(isinstance(s, str) and s for s in self.stop):
            raise PromptError(f"stop is {self.stop!r}, expected a tuple of strings that are not empty")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        if not isinstance(self.ignore_eos, bool):
            raise PromptError(f"ignore_eos is {self.ignore_eos!r}, expected true or false")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise PromptError(
                f"min_new_tokens is {self.min_new_tokens}, more than max_new_tokens = {self.max_new_tokens}"
            )


_INTEGERS: dict[str, tuple[int, int, bool]] = {
    "max_new_tokens": (1, 2**31 - 1, True),
    "min_new_tokens": (0, 2**31 - 1, False),
    "top_k": (0, 2**31 - 1, False),
    "seed": (0, 2**32 - 1, True),
    "top_logprobs": (0, MOST_LOGPROBS, True),
}
"""Least and largest value (as a device's 32 bits hold them), and whether None is allowed."""

_NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("a number of 0 (greedy) or more", lambda value: value >= 0),
    "top_p": ("a number above 0 and at most 1", lambda value: 0 < value <= 1),
    "min_p": ("a number from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": ("a number above 0", lambda value: value > 0),
    "presence_penalty": ("a finite number", lambda value: True),
    "frequency_penalty": ("a finite number", lambda value: True),
}
"""What is expected, and whether a finite number is that."""


def recommended_settings(folder: str | os.PathLike[str] | None, **given: Any) -> GenerationSettings:
    """The settings that a checkpoint recommends in `generation_config.json`, with the caller's on top.

    As in `transformers`, the file's sampling counts only where it says `do_sample`; otherwise, and where there is
    no file, decoding is greedy.

    Args:
        folder: the checkpoint's, or None where there is none.
        **given: fields of `GenerationSettings` that overrule the file; None stands for a field not given.

    Raises:
        CheckpointError: a field of the file is of a wrong type or out of range.
        PromptError: the same of a given one, or the file is no JSON object.
    """
    fields = {} if folder is None else _recommended_fields(Path(folder) / GENERATION_CONFIG)
    return GenerationSettings(**fields | {name: value for name, value in given.items() if value is not None})


def _recommended_fields(path: Path) -> dict[str, Any]:
    content = read_json_object(path)
    samples = content.get("do_sample")
    if samples is not None and not isinstance(samples, bool):
        raise CheckpointError(f"{path}: do_sample is {samples!r}, expected true or false; correct the file")
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    fields = {name: content[name] for name in names if content.get(name) is not None}
    try:
        GenerationSettings(**fields)
    except PromptError as error:
        raise CheckpointError(f"{path}: {error}; correct the file") from error
    if samples:
        return {"temperature": 1.0} | fields
    return {name: fields[name] for name in ("repetition_penalty",) if name in fields}


def _integer(name: str, value: Any, least: int, most: int) -> int:
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or not least <= int(value) <= most:
        raise PromptError(f"{name} is {value!r}, expected an integer from {least} to {most}")
    return int(value)


def _number(name: str, value: Any, expected: str, holds: Callable[[float], bool]) -> float:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise PromptError(f"{name} is {value!r}, expected {expected}")
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    with np.errstate(over="ignore"):
        on_device = float(np.float32(number))
    if not (math.isfinite(on_device) and holds(on_device)):
        raise PromptError(f"{name} is {value!r}, expected {expected}")
    return number


def _logit_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise PromptError(f"logit_bias is {bias!r}, expected a mapping of token ids to numbers")
    if len(bias) > MOST_BIASES:
        raise PromptError(f"logit_bias holds {len(bias)} ids, expected at most {MOST_BIASES}")
    return {
        _integer("a token id of logit_bias", token, 0, 2**31 - 1): _number(
            f"logit_bias of {token}", value, "a finite number", lambda value: True
        )
        for token, value in bias.items()
    }
