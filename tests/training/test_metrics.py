"""The file of a run's numbers holds every step once, however often the run was started."""

from __future__ import annotations

import json
from pathlib import Path

import jax

from qwen35_jax.training.metrics import MetricsFile, memory_bytes


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_start_after_a_step_takes_out_later_ones_and_an_unfinished_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, after=0)
    for step in (1, 2, 2, 3):
        metrics.append({"step": step})
        assert steps(path)[-1] == step  # whoever follows the file sees it at once
    metrics.close()
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    metrics = MetricsFile(path, after=2)
    assert [line["step"] for line in metrics.lines] == steps(path) == [1, 2, 2]
    metrics.append({"step": 3})
    metrics.close()
    assert [line["step"] for line in metrics.lines] == steps(path) == [1, 2, 2, 3]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_memory_is_that_of_the_process_where_the_device_does_not_tell() -> None:
    assert 50e6 < memory_bytes(jax.devices("cpu")[0]) < 1e12
