"""Keeping compiled programs between processes, so that only a model's first use waits for the compiler."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import jax


def enable_compilation_cache() -> Path | None:
    """Turns on JAX's persistent cache in the user's cache folder, unless the user has set one up.

    Called by the command line, not by the library: it changes a setting of the process. A cache that the user
    chose (`JAX_COMPILATION_CACHE_DIR`) or turned off (`JAX_ENABLE_COMPILATION_CACHE=false`) stays as it is.

    Returns:
        The folder, `$XDG_CACHE_HOME/qwen35-jax/xla/<machine>` or that below `~/.cache`; None where nothing was
        changed.
    """
    values = jax.config.values
    if values["jax_compilation_cache_dir"] or not values["jax_enable_compilation_cache"]:
        return None
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "qwen35-jax" / "xla" / _machine()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # By default only what took a second to compile is kept; a start is made of many smaller programs.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return folder


def _machine() -> str:
    """Names the processor's instruction set.

    Programs for a CPU use what the CPU has, and JAX's key does not include that: where a home folder is shared by
    different machines, each needs a folder of its own.
    """
    features = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        features = next((line for line in lines if line.lower().startswith(("flags", "features"))), features)
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"
