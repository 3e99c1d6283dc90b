"""Tokens to text while they arrive: whole characters only, and stop strings found across token edges."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from tokenizers.decoders import DecodeStream

from qwen35_jax.inference.tokenizer import Tokenizer


class Detokenizer:
    """Turns a row's tokens into text, piece by piece.

    A character may take several tokens; its bytes are held back until it is whole. The pieces and the flush
    at the end always add up to the text that decoding all tokens at once gives.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._held: list[int] = []  # tokens since the last released piece

    def push(self, token: int) -> str:
        """The text that this token completes, often empty."""
        self._held.append(token)
        piece = self._stream.step(self._tokenizer.backend, token)
        if piece is None:
            return ""
        self._held.clear()
        return piece

    def flush(self) -> str:
        """What is still held back: the start of a character that never became whole, as U+FFFD."""
        rest = self._tokenizer.decode(self._held, skip_special_tokens=self._skip_special_tokens)
        self._held.clear()
        return rest


@dataclasses.dataclass(frozen=True)
class Released:
    """Text that may be shown, and whether a stop string ended it."""

    text: str
    stopped: bool


class StopStringFilter:
    """Passes text on up to the first stop string, which may be spread over several pieces.

    A tail that could still grow into a stop string is held back. The first stop string to be complete ends
    the text (the longest, where several are complete at the same character), so that the way in which the
    text was cut into pieces does not matter.
    """

    def __init__(self, stop: Sequence[str]):
        self._stop = tuple(stop)
        self._held = ""

    def push(self, piece: str) -> Released:
        """Takes a piece of text. After `stopped` nothing more may be pushed."""
        text = self._held + piece
        matches = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if matches:
            self._held = ""
            return Released(text[: min(matches)[1]], True)
        keep = max((prefix_at_end(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return Released(text[: len(text) - keep], False)

    def flush(self) -> str:
        """The held-back tail, once no more text can come."""
        rest, self._held = self._held, ""
        return rest


class AnswerText:
    """The text of one row: its tokens through a `Detokenizer`, and that through a `StopStringFilter`.

    Args:
        tokenizer: None where there is none; the text is then empty.
        stop: strings that end the text.
        hidden: ids that never show in the text, beside the tokenizer's special tokens: the stop ids.

    Attributes:
        text: what has been released so far.
        stopped: whether a stop string has ended the text.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = (), hidden: Iterable[int] = ()):
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._filter = StopStringFilter(stop)
        self._hidden = frozenset(hidden)
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Takes a token and returns the text that it releases."""
        if self._detokenizer is None or token in self._hidden:
            return ""
        return self._release(self._detokenizer.push(token))

    def flush(self) -> str:
        """Releases what was held back, once no more tokens can come."""
        if self._detokenizer is None or self.stopped:
            return ""
        released = self._release(self._detokenizer.flush())
        if self.stopped:
            return released
        rest = self._filter.flush()
        self.text += rest
        return released + rest

    def _release(self, piece: str) -> str:
        released = self._filter.push(piece)
        self.stopped = released.stopped
        self.text += released.text
        return released.text


def prefix_at_end(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
