"""Records as nodes take them. The nodes themselves are tested with the golden files and in tests/reference."""

from __future__ import annotations

import numpy as np

from qwen35_jax.verify.nodes import pad_past


def test_past_is_padded_behind_and_other_values_are_left_alone():
    record = {"past_k": np.ones((2, 3, 1, 4)), "past_v": np.ones((2, 3, 1, 4)), "gate": np.ones((2, 3))}
    padded = pad_past(record, 5)
    assert padded["past_k"].shape == padded["past_v"].shape == (2, 5, 1, 4)
    assert not padded["past_k"][:, 3:].any()
    assert padded["past_k"][:, :3].all()
    assert padded["gate"] is record["gate"]
