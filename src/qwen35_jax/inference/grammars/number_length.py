"""An end to the numbers of a JSON text.

Schemas seldom bound a number's digits, and a model that has begun to repeat one would go on to the end of its answer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt32

from qwen35_jax.inference.grammars.walk import Walk

MOST_DIGITS = 20
"""Before the point, and as many behind it: more than any float or 64-bit integer has a use for."""
MOST_EXPONENT_DIGITS = 2
"""So that no number is too large for a float."""

NUMBERS = {
    "integer": rf"-?(0|[1-9][0-9]{{0,{MOST_DIGITS - 1}}})",
    "number": rf"-?(0|[1-9][0-9]{{0,{MOST_DIGITS - 1}}})(\.[0-9]{{1,{MOST_DIGITS}}})?"
    rf"([eE][+-]?[0-9]{{1,{MOST_EXPONENT_DIGITS}}})?",
}
"""Expressions of such numbers, by the type that schemas call them."""

_QUOTE, _BACKSLASH = b'"\\'
_EXPONENT = b"eE"
_DIGITS = b"0123456789"


class NumberLength:
    """Counts the digits of the number that a JSON text is in, as it is written.

    Attributes:
        full: whether the number has had as many digits as it may have.
    """

    def __init__(self) -> None:
        self.full = False
        self._in_string = False
        self._escaped = False
        self._digits = 0
        self._most = MOST_DIGITS

    def push(self, text: bytes) -> None:
        """Takes the next piece of the text."""
        for byte in text:
            if self._in_string:
                self._in_string = self._escaped or byte != _QUOTE
                self._escaped = byte == _BACKSLASH and not self._escaped
            elif byte in _DIGITS:
                self._digits += 1
            else:
                self._in_string = byte == _QUOTE
                # The sign of an exponent stands behind its letter; behind the letter of a word no digit follows.
                in_exponent = byte in _EXPONENT or (byte in b"+-" and self._most == MOST_EXPONENT_DIGITS)
                self._most = MOST_EXPONENT_DIGITS if in_exponent else MOST_DIGITS
                self._digits = 0
        self.full = self._digits >= self._most


class JSONWalk:
    """A walk through a grammar of JSON that leaves each number as soon as it is full, if the grammar lets it.

    Args:
        walk: through the grammar.
        tokens: bytes that each token writes.
        digit_tokens: those that begin with a digit, as bits.
    """

    def __init__(self, walk: Walk, tokens: Sequence[bytes], digit_tokens: UInt32[np.ndarray, "words"]):
        self._walk = walk
        self._tokens = tokens
        self._digit_tokens = digit_tokens
        self._length = NumberLength()

    def allowed(self) -> UInt32[np.ndarray, "words"]:
        """The tokens that may come next, see `Constraint`."""
        allowed = self._walk.allowed()
        if self._length.full:
            rest = allowed & ~self._digit_tokens
            return rest if rest.any() else allowed
        return allowed

    def accept(self, token: int) -> None:
        """Moves over a token that was drawn; errors as for `GrammarWalk`."""
        self._walk.accept(token)
        self._length.push(self._tokens[token])

    def copy(self) -> JSONWalk:
        """See `Walk`."""
        copied = JSONWalk(self._walk.copy(), self._tokens, self._digit_tokens)
        copied._length = copy.copy(self._length)
        return copied
