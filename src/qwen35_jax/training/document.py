"""One text or chat as a model learns it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int


class Document(NamedTuple):
    """Tokens that belong together, and which of them are learned.

    Attributes:
        tokens: ids, int32.
        trained: whether the model is to predict the token from those before it. Never true at the first.
    """

    tokens: Int[np.ndarray, " time"]
    trained: Bool[np.ndarray, " time"]
