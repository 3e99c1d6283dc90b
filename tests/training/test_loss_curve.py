"""The picture of a run is drawn where matplotlib is, and missed nowhere else."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from qwen35_jax.training.loss_curve import draw_loss_curve

STEPS = [
    {"step": step, "loss": 9.0, "cross_entropy": 3 / step, "learning_rate": 0.1 / step}
    for step in range(1, 9)
]
EVALUATIONS = [{"step": step, "evaluation_cross_entropy": 4 / step} for step in (4, 8)]


def color_count(path: Path, color: tuple[float, float, float]) -> int:
    return int((np.abs(imread(path)[..., :3] - color).max(-1) < 0.02).sum())


def test_losses_and_evaluations_are_in_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "loss.png"
    blue, orange = (0x1F / 255, 0x77 / 255, 0xB4 / 255), (1.0, 0x7F / 255, 0x0E / 255)
    assert draw_loss_curve(STEPS, path)
    assert color_count(path, blue) > 100 and color_count(path, orange) == 0
    assert draw_loss_curve([*STEPS, *EVALUATIONS], path)
    assert color_count(path, blue) > 100 and color_count(path, orange) > 100


def test_without_matplotlib_or_steps_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not draw_loss_curve(EVALUATIONS, tmp_path / "loss.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not draw_loss_curve(STEPS, tmp_path / "loss.png")
    assert list(tmp_path.iterdir()) == []
