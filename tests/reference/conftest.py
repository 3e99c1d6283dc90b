"""What the comparisons with transformers share. Without the `reference` extra nothing here can be imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers", "peft")):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Threads cost more than they save on models this small, most of all when tests run side by side."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
