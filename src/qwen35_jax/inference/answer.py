"""One row's answer while it grows, on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from qwen35_jax.errors import NonFiniteError
from qwen35_jax.inference.results import FinishReason, Generation
from qwen35_jax.inference.rows import Emission
from qwen35_jax.inference.streaming import AnswerText

Listener = Callable[[int | None, str, FinishReason | None], None]
"""Hears of each token with the text that it releases, and at the end of no token, the last text and the reason."""


class Answer:
    """The tokens and the text of one row.

    Attributes:
        name: what to call the row in an error.
        prompt: token ids.
        tokens: of the answer so far.
        text: its text so far, with what is held back.
        reason: why it has ended; None while it goes on.
        passes: of the model that drew its tokens.
    """

    def __init__(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        seed: int,
        text: AnswerText,
        listener: Listener,
    ):
        self.name = name
        self.prompt = tuple(prompt)
        self.seed = seed
        self.text = text
        self.tokens: list[int] = []
        self.reason: FinishReason | None = None
        self.passes = 0
        self._most = max_new_tokens
        self._listener = listener

    def take_pass(self, emission: Emission) -> None:
        """Takes what one pass of the model drew for this row, [position]."""
        self.passes += self.reason is None and bool(emission.emitted[0])
        for position in np.flatnonzero(emission.emitted):
            self.take(Emission(*(field[position] for field in emission)))

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
                f"the logits of {self.name} hold NaN or infinity at step {step} (token {len(self.prompt) + step}): "
                "the weights or the precision are broken; look at the checkpoint, or try --dtype float32"
            )
        self.tokens.append(int(emission.token))
        shown = self.text.push(self.tokens[-1])
        ends = bool(emission.stopped) or self.text.stopped
        self._listener(self.tokens[-1], shown, None)
        if ends or len(self.tokens) == self._most:
            self.end("stop" if ends else "length")

    def end(self, reason: FinishReason) -> None:
        """Releases the text that was held back, and tells of the end."""
        rest = self.text.flush()
        # What was held back may complete a stop string.
        self.reason = "stop" if self.text.stopped else reason
        self._listener(None, rest, self.reason)

    def generation(self) -> Generation:
        """The finished answer."""
        return Generation(
            prompt_tokens=self.prompt,
            tokens=tuple(self.tokens),
            text=self.text.text,
            finish_reason=self.reason or "length",
            seed=self.seed,
            passes=self.passes,
        )
