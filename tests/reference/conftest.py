"""What the comparisons with transformers share. Without the `reference` extra nothing here can be imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["test_*.py"]
elif importlib.util.find_spec("peft") is None:
    collect_ignore = ["test_peft.py"]


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
