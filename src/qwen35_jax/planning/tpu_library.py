"""What the TPU library is told on a machine without TPUs, where it serves as a compiler.

Imports no JAX, so that a command can say it before JAX loads the library: where it is installed, JAX looks for TPUs at
its first use, and the library complains at length of what it does not find.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

DEVICE_FILES = "accel*", "vfio/[0-9]*"
"""In /dev, where a machine has TPUs."""

COMPILER_ALONE: Mapping[str, str] = {
    "TPU_SKIP_MDS_QUERY": "1",  # or it asks a cloud's server which machine this is, and waits
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # or one process on a machine can plan at a time
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # programs for a topology do not depend on it
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


@contextlib.contextmanager
def compiler_alone(devices: Path = Path("/dev")) -> Iterator[None]:
    """Sets the environment variables of `COMPILER_ALONE` for a while, but none on a machine with TPUs, and none again.

    Args:
        devices: folder of the device files.
    """
    has_tpus = any(any(devices.glob(pattern)) for pattern in DEVICE_FILES)
    added = [] if has_tpus else [name for name in COMPILER_ALONE if name not in os.environ]
    os.environ.update({name: COMPILER_ALONE[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
