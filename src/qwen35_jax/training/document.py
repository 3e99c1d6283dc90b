"""One text or chat as a model learns it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int


class Document(NamedTuple):
    """Tokens that belong together, and how much each of them counts in what is learned.

    Attributes:
        tokens: ids, int32.
        weights: of each token in the loss, as one to be predicted from those before it; truth values are 1 and 0. Never
            above 0 at the first token.
    """

    tokens: Int[np.ndarray, " time"]
    weights: Bool[np.ndarray, " time"] | Float[np.ndarray, " time"]

    @property
    def trained(self) -> Bool[np.ndarray, " time"]:
        """Whether a token is learned at all."""
        return self.weights > 0

    def cut(self, length: int) -> Document:
        """Its beginning of so many tokens."""
        return Document(self.tokens[:length], self.weights[:length])
