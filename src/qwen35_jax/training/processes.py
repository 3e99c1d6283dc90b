"""A run over several processes, as a rule one for each host: started together, agreeing on the way, ended together.

Every process runs the same program on the same settings, and the arrays lie on the devices of all of them, so that
whatever touches an array has to be done by all, in the same order. What belongs to the run and not to a process, as
its files do, is done by the first alone.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from qwen35_jax.errors import ConfigError, Qwen35Error
from qwen35_jax.training.guard import TrainingError
from qwen35_jax.training.rendezvous import ProcessPlace, meet

SECONDS_TO_START = 300
"""That a process waits for the others at the start."""

SECONDS_WITHOUT_SIGN = 60
"""After which the others end when a process has gone without a word: its host is down, say."""


@contextlib.contextmanager
def joined(place: ProcessPlace | None, *, seconds_to_start: float = SECONDS_TO_START) -> Iterator[None]:
    """Within the block this process is one of a run's. To be entered before anything asks JAX for its devices.

    An error that leaves the block ends this process without waiting for the others, which wait for it in whatever they
    do together: these are then ended by JAX, at once where they find its connections closed, after
    `SECONDS_WITHOUT_SIGN` at most.

    Args:
        place: of this process. Without one, that which SLURM, Open MPI or a TPU host tells, or else it is alone.
        seconds_to_start: to wait for the others.

    Raises:
        ConfigError: the others did not come, or more than were expected.
        TrainingError: another process ended before this one.
    """
    # JAX would take SIGTERM for itself, also where nothing asks whether it came.
    jax.config.update("jax_enable_preemption_service", False)
    timeouts: dict[str, Any] = {
        "initialization_timeout": int(seconds_to_start),
        "heartbeat_timeout_seconds": SECONDS_WITHOUT_SIGN,
    }
    if place is not None:
        if place.count == 1:
            yield
            return
        meet(place, seconds=seconds_to_start)
        jax.distributed.initialize(
            place.coordinator, place.count, place.index, cluster_detection_method="deactivate", **timeouts
        )
    elif in_cluster(os.environ):
        try:
            jax.distributed.initialize(**timeouts)
        except (RuntimeError, ValueError, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"the processes of this job did not find each other: {reason}") from error
    try:
        yield
    except BaseException as error:
        if jax.process_count() == 1:
            raise
        if isinstance(error, jax.errors.JaxRuntimeError) and "Gloo" in str(
            error
        ):  # what joins processes on CPUs
            _leave_at_exit(2)
            reason = str(error).partition("\n")[0]
            raise TrainingError(f"another process has ended, see what it says ({reason})") from error
        _leave_at_exit(2 if isinstance(error, Qwen35Error) else 1)
        raise


def in_cluster(environment: Mapping[str, str]) -> bool:
    """Whether a launcher has started several processes, or may have: on TPU hosts only their service knows.

    Args:
        environment: variables of this process.
    """
    counts = [environment.get(name, "1") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")]
    return any(count.isdecimal() and int(count) > 1 for count in counts) or _has_tpu()


def _has_tpu() -> bool:
    platforms = jax.config.values["jax_platforms"]
    return (
        any(Path(device).exists() for device in ("/dev/accel0", "/dev/vfio/0"))
        and importlib.util.find_spec("libtpu") is not None
        and (not platforms or "tpu" in platforms)
    )


def _leave_at_exit(status: int) -> None:
    """Makes the interpreter's end that of the process: JAX would wait there until all processes end well."""

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    atexit.register(leave)


def is_first() -> bool:
    """Whether this process does what is done once for a run."""
    return jax.process_index() == 0


def largest(value: int) -> int:
    """The largest of what the processes say. All have to ask; one alone is told what it said."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.process_allgather(np.int32(value)).max())


def check_alike(facts: Mapping[str, str]) -> None:
    """Makes sure that all processes do the same.

    Args:
        facts: what has to be the same everywhere, by what it is called; all processes tell as many.

    Raises:
        ConfigError: in all processes, if something is not.
    """
    if jax.process_count() == 1:
        return
    numbers = np.array([zlib.crc32(text.encode()) >> 1 for text in facts.values()], np.int32)
    for name, told in zip(facts, multihost_utils.process_allgather(numbers).T, strict=True):
        if others := np.flatnonzero(told != told[0]).tolist():
            raise ConfigError(
                f"{name} differ between process 0 and process {others[0]}: every process needs the same config file, "
                "the same data and a run.output on a disk that all of them share"
            )
