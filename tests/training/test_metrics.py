"""The file of a run's numbers holds every step once, however often the run was started."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path

import jax
import pytest

from qwen35_jax.errors import CheckpointError
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


def test_a_line_that_cannot_be_written_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, after=0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
    try:
        metrics.append({"step": 1})
        for _ in range(2):  # the one that fits in part, and the one that does not fit at all
            with pytest.raises(CheckpointError, match=r"metrics\.jsonl: cannot be written: "):
                metrics.append({"step": 2})
        metrics.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert [line["step"] for line in MetricsFile(path, after=2).lines] == [1]


def test_memory_is_that_of_the_process_where_the_device_does_not_tell() -> None:
    assert 50e6 < memory_bytes(jax.devices("cpu")[0]) < 1e12
