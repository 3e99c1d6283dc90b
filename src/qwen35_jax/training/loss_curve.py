"""The picture of a run: its losses and its learning rate over the steps. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_loss_curve(lines: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Draws the lines of `metrics.jsonl` as a PNG.

    Args:
        lines: of steps and evaluations, in order.
        path: of the picture, which is made or replaced.

    Returns:
        Whether it was drawn: not without matplotlib, and not without a step.
    """
    try:
        from matplotlib.figure import Figure  # not pyplot, whose figures belong to the whole process
    except ImportError:
        return False
    steps = [line for line in lines if "loss" in line]
    if not steps:
        return False
    # Of pairs of answers there is no cross-entropy.
    name, label = (
        ("cross_entropy", "cross-entropy, nats a token")
        if "cross_entropy" in steps[0]
        else ("loss", "loss, nats a pair")
    )
    evaluations = [line for line in lines if f"evaluation_{name}" in line]
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    rate_axes = axes.twinx()
    rate_axes.plot(*_series(steps, "learning_rate"), color="0.7", linewidth=1, label="learning rate")
    rate_axes.set_ylabel("learning rate")
    rate_axes.set_ylim(bottom=0)
    axes.plot(*_series(steps, name), color="tab:blue", linewidth=1, label="training")
    if evaluations:
        series = _series(evaluations, f"evaluation_{name}")
        axes.plot(*series, color="tab:orange", marker="o", label="evaluation")
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.set_zorder(rate_axes.get_zorder() + 1)
    axes.patch.set_visible(False)
    figure.legend(*_legend(axes, rate_axes), loc="outside upper right", ncols=3)
    figure.savefig(path, format="png", dpi=120)
    return True


def _series(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    return [line["step"] for line in lines], [line[name] for line in lines]


def _legend(*all_axes: Any) -> tuple[list[Any], list[str]]:
    handles: list[Any] = []
    labels: list[str] = []
    for axes in all_axes:
        found = axes.get_legend_handles_labels()
        handles += found[0]
        labels += found[1]
    return handles, labels
