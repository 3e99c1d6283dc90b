"""The perplexity of a text under a model, over windows that slide along it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Int

from qwen35_jax.errors import PromptError
from qwen35_jax.inference.runnable import RunnableModel
from qwen35_jax.inference.scoring import Continuation, TokenScores, score


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """How well a model predicts a text.

    Attributes:
        scored_tokens: all tokens of the text but the first, which nothing predicts.
        nats: minus the sum of their log-probabilities.
        read_tokens: that the model ran over: more than were scored, where windows overlap.
        seconds: wall-clock time without that of the next.
        compile_seconds: tracing and compiling.
    """

    scored_tokens: int
    nats: float
    read_tokens: int
    seconds: float
    compile_seconds: float

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.scored_tokens

    @property
    def perplexity(self) -> float:
        """Infinite where it is too large for a float."""
        try:
            return math.exp(self.nats_per_token)
        except OverflowError:
            return math.inf

    @property
    def tokens_per_second(self) -> float:
        """Scored tokens a second."""
        return self.scored_tokens / self.seconds

    def bits_per_byte(self, nbytes: int) -> float:
        """The same measure without regard to how the text is cut into tokens.

        Args:
            nbytes: of the scored tokens' text, in UTF-8.
        """
        return self.nats / math.log(2) / nbytes


def perplexity(
    model: RunnableModel,
    tokens: Sequence[int],
    *,
    window: int,
    stride: int,
    batch: int = 4,
    on_scored: Callable[[int, TokenScores], None] = lambda number, scores: None,
) -> Perplexity:
    """The perplexity of a text.

    Every token but the first is scored once, given the tokens before it in its window: all tokens of the text where it
    is no longer than a window, and otherwise at least `window - stride + 1` once that many stand before it. Each window
    starts from an empty memory: what a recurrent layer knows of the text before it is not carried over.

    Args:
        model: from `qwen35_jax.checkpoint.load`.
        tokens: ids of the text, at least two.
        window: tokens that the model reads at a time, at most its context. A window as long as the text is one pass
            over all of it, in memory that grows with the keys and values alone.
        stride: tokens from the start of a window to that of the next, at most `window`. A smaller one gives the scored
            tokens more context and takes more time.
        batch: windows that run side by side, at most.
        on_scored: called with the number and the scores of each window as they come.

    Raises:
        PromptError: too few tokens, bad ids, a window longer than the context, or a stride longer than the window.
        NonFiniteError: the model's logits hold NaN or infinity.
    """
    context = model.config.text.max_context
    check_windows(len(tokens), window=window, stride=stride, context=context)
    result = score(
        model, sliding_windows(tokens, window=window, stride=stride), batch=batch, on_scored=on_scored
    )
    return Perplexity(
        scored_tokens=len(tokens) - 1,
        nats=-math.fsum(scores.total for scores in result.scores),
        read_tokens=result.read_tokens,
        seconds=result.seconds,
        compile_seconds=result.compile_seconds,
    )


def check_windows(tokens: int, *, window: int, stride: int, context: int) -> None:
    """What can be known before the weights are read; raises as `perplexity` does.

    Args:
        tokens: how many the text has.
        window: see `perplexity`.
        stride: see `perplexity`.
        context: of the model.
    """
    if tokens < 2:
        raise PromptError(
            f"the text has {tokens} token{'s' * (tokens != 1)}, expected at least 2: the first predicts the second"
        )
    if not 1 <= window <= context:
        raise PromptError(f"window is {window}, expected 1 to {context} tokens, the model's context")
    if not 1 <= stride <= window:
        raise PromptError(
            f"stride is {stride}, expected 1 to {window}, the window: a longer one leaves tokens out"
        )


def sliding_windows(
    tokens: Sequence[int] | Int[np.ndarray, " text"], *, window: int, stride: int
) -> Iterator[Continuation]:
    """Cuts a text into windows, each with the tokens that it is to score.

    Window k reads `window` tokens from place `k * stride` on. Each token read predicts the next one; scored are those
    that no window before has scored: all in the first window, the last `stride` in the others.
    """
    ids = np.asarray(tokens)
    start, scored_from = 0, 1
    while scored_from < len(ids):
        end = min(start + window + 1, len(ids))
        yield Continuation(ids[start:scored_from], ids[scored_from:end])
        start, scored_from = start + stride, end
