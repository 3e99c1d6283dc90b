"""The text of an error is one line that a terminal only prints, whatever it quotes."""

from __future__ import annotations

import pytest

from qwen35_jax.errors import CheckpointError


@pytest.mark.parametrize(
    ("quoted", "printed"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("größe 模型", "größe 模型"),
        ("a\nb\tc", "a b c"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a file\udcff", "a file\\udcff"),
    ],
)
def test_what_an_error_quotes_stays_on_its_line(quoted: str, printed: str) -> None:
    assert str(CheckpointError(f"tensor '{quoted}': unknown")) == f"tensor '{printed}': unknown"
