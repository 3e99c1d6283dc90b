"""Walks through grammars: the constraints that an engine asks, token by token, what may come next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from jaxtyping import UInt32

from qwen35_jax.inference.constraint import Constraint
from qwen35_jax.inference.grammars.errors import GrammarError, reason

if TYPE_CHECKING:
    import llguidance


class Walk(Constraint, Protocol):
    """A constraint of which there can be another one that goes on from the same place."""

    def copy(self) -> Walk:
        """Another walk that goes on from here; the grammar is not compiled again."""
        ...


class GrammarWalk:
    """A walk through one grammar of `llguidance`, for one answer.

    Args:
        matcher: at the grammar's beginning, and of no other walk.
        stop_id: the id that stands in the matcher's masks for the end of the grammar.
        stop_ids: every id that stops an answer, the former among them, as bits.
    """

    def __init__(self, matcher: llguidance.LLMatcher, stop_id: int, stop_ids: UInt32[np.ndarray, "words"]):
        self._matcher = matcher
        self._stop_id = stop_id
        self._stop_ids = stop_ids
        self._stopped = False

    def allowed(self) -> UInt32[np.ndarray, "words"]:
        """The tokens that may come next, see `Constraint`; an array of the caller's own.

        Raises:
            GrammarError: the grammar is too complex from here on.
        """
        from llguidance.numpy import fill_next_token_bitmask

        if self._stopped:
            return self._stop_ids.copy()
        mask = np.empty((1, self._stop_ids.size), np.int32)
        fill_next_token_bitmask(self._matcher, mask)
        self._check("has become too complex to walk")
        allowed = mask.view(np.uint32)[0]
        if is_allowed(allowed, self._stop_id):
            allowed |= self._stop_ids
        return allowed

    def accept(self, token: int) -> None:
        """Moves over a token that was drawn.

        Raises:
            GrammarError: the token was not allowed, or the grammar is too complex from here on.
        """
        if is_allowed(self._stop_ids, token):
            if not self._matcher.is_accepting():
                raise GrammarError(f"token {token} ends an answer that its grammar does not let end here")
            self._stopped = True
        elif self._stopped:
            raise GrammarError(f"token {token} follows the end of its answer")
        else:
            self._matcher.consume_token(token)
            self._check(f"does not go on with token {token}")

    def copy(self) -> GrammarWalk:
        """See `Walk`."""
        copied = GrammarWalk(self._matcher.deep_copy(), self._stop_id, self._stop_ids)
        copied._stopped = self._stopped
        return copied

    @property
    def complete(self) -> bool:
        """Whether nothing may follow any more but the end."""
        return self._stopped or self._matcher.is_stopped()

    def _check(self, complaint: str) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"the answer's grammar {complaint}: {reason(self._matcher.get_error())}")


class AfterThought:
    """A constraint on what follows the thoughts, which are free but for their end: it has to come.

    Args:
        thought: a walk through the thoughts, their closing tag and what separates them from the answer.
        answer: a walk through the rest.
    """

    def __init__(self, thought: GrammarWalk, answer: Walk):
        self._thought = thought
        self._answer = answer

    def allowed(self) -> UInt32[np.ndarray, "words"]:
        """The tokens that may come next, see `Constraint`."""
        return self._answer.allowed() if self._thought.complete else self._thought.allowed()

    def accept(self, token: int) -> None:
        """Moves over a token that was drawn; errors as for `GrammarWalk`."""
        (self._answer if self._thought.complete else self._thought).accept(token)

    def copy(self) -> AfterThought:
        """See `Walk`."""
        return AfterThought(self._thought.copy(), self._answer.copy())


def as_bits(tokens: tuple[int, ...], rows: int) -> UInt32[np.ndarray, "words"]:
    """A set of tokens as `Constraint.allowed` writes it."""
    bits = np.zeros(-(-rows // 32), np.uint32)
    for token in tokens:
        bits[token // 32] |= np.uint32(1 << token % 32)
    return bits


def is_allowed(bits: UInt32[np.ndarray, "words"], token: int) -> bool:
    """Whether a token is in a set of tokens."""
    return bool(bits[token // 32] >> np.uint32(token % 32) & 1)
