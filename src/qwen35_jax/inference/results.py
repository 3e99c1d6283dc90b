"""What a generation gives back: tokens as they come, the answers, and how long they took."""

from __future__ import annotations

import dataclasses
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled"]


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """How likely the model itself found a token, before bias, penalties, temperature and truncation.

    Attributes:
        token: the token drawn.
        logprob: natural logarithm of its probability.
        top: the most likely tokens at this place with theirs, most likely first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class TokenEvent:
    """News about one row, passed to `on_token`.

    Attributes:
        row: index of the prompt.
        token: the token drawn; None for the event that ends a row.
        text: text that may now be shown. Characters come whole, so it is often empty and then more at once.
        finish_reason: why the row ended; None while it goes on.
        logprob: of the token, where the settings ask for it.
    """

    row: int
    token: int | None
    text: str
    finish_reason: FinishReason | None = None
    logprob: TokenLogprob | None = None


@dataclasses.dataclass(frozen=True)
class Generation:
    """One prompt's answer.

    Attributes:
        prompt_tokens: what the model was given.
        tokens: what it drew, a stop id at the end included.
        text: the tokens as text, without special tokens, stop strings and what follows them; empty where there
            is no tokenizer.
        finish_reason: `stop` after a stop id or stop string, `length` when the tokens ran out, `cancelled` when its
            client did not want more.
        seed: repeats these draws.
        passes: of the model over this row after its prompt.
        logprobs: of the tokens, where the settings ask for them.
        cached_tokens: of the prompt, those that did not have to be consumed because an engine remembered them.
    """

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    seed: int
    passes: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    cached_tokens: int = 0

    @property
    def tokens_per_pass(self) -> float:
        """Mean tokens drawn after a pass of the model over the answer: 1, or more where guesses held; 0 without one."""
        return (len(self.tokens) - 1) / self.passes if self.passes else 0.0


@dataclasses.dataclass(frozen=True)
class Timing:
    """Wall-clock seconds of one `generate` call.

    Attributes:
        compile_seconds: tracing and compiling; about nothing once the programs exist. Not part of the others.
        prefill_tokens: prompt tokens of all rows, padding not counted.
        prefill_seconds: from the first chunk to the first drawn token.
        decode_tokens: tokens drawn after the first of each row.
        decode_seconds: from the first drawn token to the last.
    """

    compile_seconds: float
    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """0 where a single token was drawn: the prefill already gives that one."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """The answers, in the order of the prompts, and how long they took."""

    generations: tuple[Generation, ...]
    timing: Timing
