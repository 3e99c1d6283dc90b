"""What the official implementation computed with the golden model: tests/golden/, written by scripts/make_golden.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chex
import numpy as np
from safetensors.numpy import load_file

GOLDEN = Path(__file__).parent / "golden"
LAST_DIGITS = 1e-12


def golden(name: str, group: str) -> SimpleNamespace:
    """One group of one golden file, values as attributes."""
    arrays = load_file(GOLDEN / f"{name}.safetensors")
    prefix = f"{group}/"
    return SimpleNamespace(
        **{key[len(prefix) :]: value for key, value in arrays.items() if key.startswith(prefix)}
    )


def assert_close(ours: Any, reference: Any, bound: float = LAST_DIGITS, where: str = "") -> None:
    """Largest difference at most `bound` times the largest value. NaN is never close."""
    ours, reference = np.asarray(ours), np.asarray(reference)
    chex.assert_equal_shape([ours, reference], custom_message=where)
    error = np.abs(ours - reference).max() / np.abs(reference).max()
    assert error <= bound, f"{where}: relative error {error:.1e}"
