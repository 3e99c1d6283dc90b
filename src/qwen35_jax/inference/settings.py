"""What a caller may ask of a generation, checked before anything is compiled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from qwen35_jax.errors import PromptError

DEFAULT_NEW_TOKENS = 128


@dataclasses.dataclass(frozen=True)
class GenerationSettings:
    """How one prompt is continued. The defaults are greedy decoding.

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

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None:
            _require_integer("max_new_tokens", self.max_new_tokens, 1)
        _require_integer("min_new_tokens", self.min_new_tokens, 0)
        _require_integer("top_k", self.top_k, 0)
        if self.seed is not None:
            _require_integer("seed", self.seed, 0, 2**32 - 1)
        _require("temperature", self.temperature, self.temperature >= 0, "0 (greedy) or more")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "more than 0 and at most 1")
        _require("min_p", self.min_p, 0 <= self.min_p <= 1, "between 0 and 1")
        _require("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "more than 0")
        _require("presence_penalty", self.presence_penalty, True, "a finite number")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise PromptError(
                f"min_new_tokens is {self.min_new_tokens}, more than max_new_tokens = {self.max_new_tokens}"
            )
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise PromptError(f"stop is {self.stop!r}, expected a tuple of strings that are not empty")


def recommended_settings(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling fields that a checkpoint's `generation_config.json` asks for.

    As in `transformers`, they count only where the file says `do_sample`; otherwise decoding is greedy.

    Returns:
        Keyword arguments of `GenerationSettings`.
    """
    fields = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    if not generation_config.get("do_sample"):
        fields = ("repetition_penalty",)
    chosen = {name: generation_config[name] for name in fields if generation_config.get(name) is not None}
    if generation_config.get("do_sample"):
        chosen.setdefault("temperature", 1.0)
    return chosen


def _require_integer(name: str, value: Any, least: int, most: int | None = None) -> None:
    bounds = f"an integer of at least {least}" + ("" if most is None else f" and at most {most}")
    inside = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not inside or (most is not None and value > most):
        raise PromptError(f"{name} is {value!r}, expected {bounds}")


def _require(name: str, value: float, holds: bool, expected: str) -> None:
    if not (math.isfinite(value) and holds):
        raise PromptError(f"{name} is {value!r}, expected {expected}")
