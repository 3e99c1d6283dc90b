"""Answers that have to keep to a grammar: which tokens may come next."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from jaxtyping import UInt32


class Constraint(Protocol):
    """A walk through a grammar, one token at a time, on the host.

    Where the grammar may end, the ids that stop an answer are among the allowed ones; where it must end, they are the
    only ones.
    """

    def allowed(self) -> UInt32[np.ndarray, "words"]:
        """The tokens that may come next, as bits: token t is bit t % 32 of word t // 32."""
        ...

    def accept(self, token: int) -> None:
        """Moves over a token that was drawn."""
        ...
