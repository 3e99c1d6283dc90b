"""Without TPUs the TPU library is a compiler: what it is told, and that nothing of it stays."""

from __future__ import annotations

import os

import pytest

from qwen35_jax.planning.tpu_library import COMPILER_ALONE, compiler_alone


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in COMPILER_ALONE:
        monkeypatch.delenv(name, raising=False)


def test_a_machine_without_tpus_is_told_of_for_a_while(tmp_path):
    with compiler_alone(tmp_path):
        assert COMPILER_ALONE.items() <= os.environ.items()
    assert not COMPILER_ALONE.keys() & os.environ.keys()


def test_what_is_set_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("TPU_WORKER_ID", "3")
    with compiler_alone(tmp_path):
        assert os.environ["TPU_WORKER_ID"] == "3"
    assert os.environ["TPU_WORKER_ID"] == "3"


@pytest.mark.parametrize("device", ["accel0", "vfio/1"])
def test_a_machine_with_tpus_is_left_alone(tmp_path, device):
    (tmp_path / "vfio").mkdir()
    (tmp_path / device).touch()
    with compiler_alone(tmp_path):
        assert not COMPILER_ALONE.keys() & os.environ.keys()
