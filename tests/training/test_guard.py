"""The guard stops at what is not finite and at a jump, and at nothing else."""

from __future__ import annotations

import math

import pytest

from qwen35_jax.training.guard import WINDOW, Guard, TrainingError

NAMES = [f"layers.{index}.weight" for index in range(6)]
FINE = [True] * 6


def test_a_gradient_that_is_not_finite_is_told_with_the_step_and_the_names() -> None:
    guard = Guard(NAMES, spike=math.inf)
    guard.check(1, 2.0, FINE)
    with pytest.raises(
        TrainingError, match=r"step 2: the gradient of layers\.1\.weight, layers\.4\.weight is not finite"
    ):
        guard.check(2, 2.0, [True, False, True, True, False, True])
    with pytest.raises(
        TrainingError, match=r"layers\.3\.weight and 2 more is not finite \(of 6 of 6 parameters"
    ):
        guard.check(3, math.nan, [False] * 6)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run(loss: float) -> None:
    with pytest.raises(TrainingError, match="step 9: the cross-entropy is"):
        Guard(NAMES, spike=math.inf).check(9, loss, FINE)


def test_a_spike_is_told_from_the_median_of_the_window_before() -> None:
    guard = Guard(NAMES, spike=1.0)
    for step in range(1, WINDOW):
        guard.check(step, 2.0, FINE)
    guard.check(WINDOW, 99.0, FINE)  # too few steps before it to tell
    guard.check(WINDOW + 1, 3.0, FINE)
    with pytest.raises(
        TrainingError, match=r"step 22: the cross-entropy is 3.01, more than run.spike = 1 nats above 2"
    ):
        guard.check(WINDOW + 2, 3.01, FINE)


def test_a_run_that_goes_on_knows_the_steps_before() -> None:
    before = [9.0] * 30 + [2.0] * WINDOW
    with pytest.raises(TrainingError, match="step 51"):
        Guard(NAMES, spike=1.0, before=before).check(51, 3.01, FINE)


def test_a_loss_that_falls_is_never_a_spike() -> None:
    guard = Guard(NAMES, spike=0.5)
    for step in range(1, 100):
        guard.check(step, 12 / step + 0.4 * (step % 2), FINE)
