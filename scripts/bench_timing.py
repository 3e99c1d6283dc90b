"""What the benchmarks share: how programs are timed against each other, and what machine that was."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

REST_SECONDS = 0.5
CPU_FEATURES = ("amx_bf16", "avx512_bf16")
"""Instructions that multiply bfloat16: without them it is no faster than float32, with AMX many times."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of the runs of one program."""

    runs: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.runs)

    @property
    def spread(self) -> list[float]:
        return [min(self.runs), max(self.runs)]


def time_in_turn(
    programs: dict[str, Callable[[], Any]], rounds: int, *, calls_per_run: int = 1
) -> dict[str, Timing]:
    """Times programs in turn, so that a busy minute of the machine slows all of them, and each as if it were alone.

    The worker threads of a framework spin for a while after a call before they sleep: OpenMP's in PyTorch, and those
    of XLA. Called straight after each other, the programs of two frameworks take cores from one another: a decode
    step of 0.11 s took 0.30 s. So before each run there is a rest, in which the other's threads go to sleep, and then
    one call that is not timed, which wakes this one's and brings its weights back to the caches.

    Args:
        programs: by name; each returns when its work is done.
        rounds: runs of each program.
        calls_per_run: calls in direct succession that make one run; its time is their mean.

    Returns:
        Seconds per call of every run, by name. The first call of a program, which compiles, is in none.
    """
    for program in programs.values():
        program()
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            time.sleep(REST_SECONDS)
            program()
            start = time.perf_counter()
            for _ in range(calls_per_run):
                program()
            seconds[name].append((time.perf_counter() - start) / calls_per_run)
    return {name: Timing(tuple(runs)) for name, runs in seconds.items()}


def calls_in_turn(rounds: int, *, calls_per_run: int = 1) -> int:
    """How often `time_in_turn` calls each program."""
    return 1 + rounds * (1 + calls_per_run)


def machine() -> dict[str, Any]:
    """The device, its cores and features that decide the speed of matrix products, and the versions at work."""
    return {
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "cpu_features": _cpu_features(),
        "versions": {name: _version(name) for name in ("jax", "torch", "transformers")},
    }


def machine_line(found: dict[str, Any]) -> str:
    """What `machine` found, in one line."""
    features = [f"{'' if there else 'no '}{name}" for name, there in found["cpu_features"].items()]
    versions = [f"{name} {version or 'not installed'}" for name, version in found["versions"].items()]
    return f"{found['device']}, {found['cores']} cores; {', '.join([*features, *versions])}"


def _cpu_features() -> dict[str, bool]:
    """Which of CPU_FEATURES the processor has; empty where the system does not say (it does on Linux)."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return {}
    flags = {
        flag for line in cpuinfo.read_text().splitlines() if line.startswith("flags") for flag in line.split()
    }
    return {name: name in flags for name in CPU_FEATURES}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
