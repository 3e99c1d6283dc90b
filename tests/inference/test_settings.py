from __future__ import annotations

import math
from typing import Any

import pytest

from qwen35_jax.errors import PromptError
from qwen35_jax.inference.settings import GenerationSettings, recommended_settings


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 2.5),
        ("min_new_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("presence_penalty", math.inf),
        ("seed", -1),
        ("seed", 2**32),
        ("stop", "abc"),
        ("stop", ("",)),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(field: str, bad: Any) -> None:
    with pytest.raises(PromptError, match=f"^{field} is"):
        GenerationSettings(**{field: bad})


def test_min_new_tokens_above_max_new_tokens_is_refused() -> None:
    with pytest.raises(PromptError, match="min_new_tokens is 5, more than max_new_tokens = 4"):
        GenerationSettings(min_new_tokens=5, max_new_tokens=4)


def test_generation_config_counts_where_it_asks_for_sampling() -> None:
    file = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}
    assert recommended_settings(file) == {"temperature": 0.7, "top_k": 20, "top_p": 0.95}
    assert recommended_settings(file | {"do_sample": False, "repetition_penalty": 1.1}) == {
        "repetition_penalty": 1.1
    }
    assert recommended_settings({"do_sample": True}) == {"temperature": 1.0}
    assert recommended_settings({}) == {}
