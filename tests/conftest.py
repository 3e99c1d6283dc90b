"""What every test shares: a CPU backend, float64 on request, and how hypothesis runs."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

# Before jax starts: tests run on the CPU unless the caller names another platform, and compile afresh,
# so that a stale cache can neither hide a broken program nor speed up a count of compilations.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

# A shell hands an ignored Ctrl-C on to what it runs in the background, and that to its children: programs whose
# interrupts are tested would never hear of one.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import jax
import pytest

# Compilation makes the first example of a test slow, so no example has a deadline. On CI the examples are
# the same every time: a change is judged by its own merits; runs by hand go on looking for new ones.
hypothesis.settings.register_profile("default", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_report_header() -> str | None:
    """Says which tests a run without the `reference` extra does not even collect."""
    missing = [name for name in ("torch", "transformers", "peft") if importlib.util.find_spec(name) is None]
    return f"tests/reference is left out: {' and '.join(missing)} not installed" if missing else None


MOST_MAPPINGS = 25_000
"""Linux gives a process 65,530 mappings of memory, unless told otherwise, and every compiled program takes some."""


@pytest.fixture(autouse=True, scope="module")
def programs_are_forgotten_in_time() -> Iterator[None]:
    """Drops compiled programs after a file of tests, if there are many: without mappings left the compiler aborts."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and len(mappings.read_bytes().splitlines()) > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def x64() -> Iterator[None]:
    """Float64 for the duration of one test. Arrays made before or after it keep their float32."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def compiled_quickly() -> Iterator[None]:
    """Without most optimizations for the duration of one test: for those that compile far longer than they run."""
    optimizations_left_out = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", optimizations_left_out)
