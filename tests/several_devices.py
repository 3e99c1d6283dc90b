"""Programs that need several devices: they run in a process of their own, since JAX counts its devices once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def printed_by(program: str, *arguments: str, devices: int) -> Any:
    """What a Python program over so many CPU devices prints last, a line of JSON.

    Compiling takes most of the time of these programs, and their arrays are small: XLA leaves out most optimizations.
    """
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    command = [sys.executable, "-c", program, *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout.splitlines()[-1])
