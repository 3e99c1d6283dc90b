"""Whether a run is one of several processes is found out without asking for devices, and what differs is named."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from jax.experimental import multihost_utils

from qwen35_jax.errors import ConfigError
from qwen35_jax.training import processes
from qwen35_jax.training.processes import check_alike, in_cluster, joined, largest
from qwen35_jax.training.rendezvous import ProcessPlace


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, False),
        ({"SLURM_NTASKS": "4"}, False),  # a batch script by itself: srun starts the processes
        ({"SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_STEP_NUM_TASKS": "4"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "many"}, False),
    ],
)
def test_launchers_are_known_by_what_they_leave_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str], found: bool
) -> None:
    monkeypatch.setattr(processes, "_has_tpu", lambda: False)
    assert in_cluster(environment) is found


def test_one_process_alone_needs_no_other_and_agrees_with_itself() -> None:
    with joined(ProcessPlace("", 1, 0)):
        assert largest(7) == 7
        check_alike({"the settings": "any"})


def test_what_differs_between_processes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def gathered(numbers: np.ndarray) -> np.ndarray:
        return np.stack([numbers, numbers, numbers + np.array([0, 1])])

    monkeypatch.setattr(processes.jax, "process_count", lambda: 3)
    monkeypatch.setattr(multihost_utils, "process_allgather", gathered)
    with pytest.raises(
        ConfigError, match=r"^the data differ between process 0 and process 2: every process needs"
    ):
        check_alike({"the settings": "same", "the data": "other"})


def test_an_answer_of_several_processes_is_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.jax, "process_count", lambda: 3)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda value: np.array([0, 15, value]))
    assert largest(2) == 15
