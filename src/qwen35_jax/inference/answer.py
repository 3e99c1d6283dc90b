"""One row's answer while it grows, on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from qwen35_jax.errors import NonFiniteError
from qwen35_jax.inference.results import FinishReason, Generation, TokenEvent, TokenLogprob
from qwen35_jax.inference.rows import Emission, Logprobs, part_of
from qwen35_jax.inference.settings import GenerationSettings
from qwen35_jax.inference.streaming import AnswerText
from qwen35_jax.inference.tokenizer import Tokenizer


class Answer:
    """The tokens and the text of one row.

    Args:
        prompt: token ids.
        settings: of the row, with `max_new_tokens` filled in.
        seed: of its draws.
        tokenizer: None where there is none; the answer then has no text.
        stop_ids: ids that end it.
        listener: hears of each token with the text that it releases, and at the end of no token, the last text and
            the reason.
        row: what the listener is told of whose answer it is.

    Attributes:
        tokens: of the answer so far.
        text: its text so far, with what is held back.
        reason: why it has ended; None while it goes on.
        passes: of the model that drew its tokens.
        cached_tokens: see `Generation`.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        settings: GenerationSettings,
        *,
        seed: int,
        tokenizer: Tokenizer | None,
        stop_ids: Iterable[int],
        listener: Callable[[TokenEvent], None],
        row: int,
    ):
        assert settings.max_new_tokens is not None
        self.prompt = tuple(prompt)
        self.seed = seed
        self.row = row
        self.text = AnswerText(tokenizer, settings.stop, stop_ids)
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.reason: FinishReason | None = None
        self.passes = 0
        self.cached_tokens = 0
        self._most = settings.max_new_tokens
        self._top_logprobs = settings.top_logprobs
        self._listener = listener

    def take_pass(self, emission: Emission) -> None:
        """Takes what one pass of the model drew for this row, [position]."""
        self.passes += self.reason is None and bool(emission.emitted[0])
        for position in np.flatnonzero(emission.emitted):
            self.take(part_of(emission, int(position)))

    def take(self, emission: Emission) -> None:
        """Takes one draw for this row. After the answer's end it is not looked at.

        Raises:
            NonFiniteError: the logits of the draw held NaN or infinity.
        """
        if self.reason is not None or not emission.emitted:
            return
        if not emission.finite:
            step = len(self.tokens)
            raise NonFiniteError(
                f"the logits of row {self.row} hold NaN or infinity at step {step} "
                f"(token {len(self.prompt) + step}): "
                "the weights or the precision are broken; look at the checkpoint, or try --dtype float32"
            )
        token = int(emission.token)
        self.tokens.append(token)
        logprob = self._told(token, emission.logprobs)
        shown = self.text.push(token)
        ends = bool(emission.stopped) or self.text.stopped
        self._listener(TokenEvent(self.row, token, shown, logprob=logprob))
        if ends or len(self.tokens) == self._most:
            self.end("stop" if ends else "length")

    def end(self, reason: FinishReason) -> None:
        """Releases the text that was held back, and tells of the end."""
        rest = self.text.flush()
        # What was held back may complete a stop string.
        self.reason = "stop" if self.text.stopped else reason
        self._listener(TokenEvent(self.row, None, rest, self.reason))

    def generation(self) -> Generation:
        """The finished answer."""
        return Generation(
            prompt_tokens=self.prompt,
            tokens=tuple(self.tokens),
            text=self.text.text,
            finish_reason=self.reason or "length",
            seed=self.seed,
            passes=self.passes,
            logprobs=None if self._top_logprobs is None else tuple(self.logprobs),
            cached_tokens=self.cached_tokens,
        )

    def _told(self, token: int, logprobs: Logprobs) -> TokenLogprob | None:
        if self._top_logprobs is None:
            return None
        top = zip(logprobs.top_tokens.tolist(), logprobs.top.tolist(), strict=True)
        told = TokenLogprob(token, float(logprobs.drawn), tuple(top)[: self._top_logprobs])
        self.logprobs.append(told)
        return told
