from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen35_jax.errors import CheckpointError, PromptError
from qwen35_jax.inference.sampling import stack_settings
from qwen35_jax.inference.settings import GenerationSettings, recommended_settings

INTEGERS = ("max_new_tokens", "min_new_tokens", "top_k", "seed")
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("max_new_tokens", 0),
        ("min_new_tokens", -1),
        ("temperature", -0.1),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_p", 0.0),
        ("top_p", 1e-60),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", 1e-60),
        ("seed", -1),
        ("seed", 2**32),
        ("stop", "abc"),
        ("stop", ("",)),
        ("stop", 5),
        ("stop", None),
        ("ignore_eos", "no"),
        *((field, bad) for field in NUMBERS for bad in (math.nan, math.inf, 1e300, 10**400)),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(field: str, bad: Any) -> None:
    with pytest.raises(PromptError, match=f"^{field} is .*, expected"):
        GenerationSettings(**{field: bad})


@pytest.mark.parametrize("bad", ["hot", "1", [1], {}, True, 1j, np.bool_(True), np.array([1, 2])])
@pytest.mark.parametrize("field", [*INTEGERS, *NUMBERS])
def test_a_setting_of_a_wrong_type_is_refused_by_name(field: str, bad: Any) -> None:
    with pytest.raises(PromptError, match=f"^{field} is .*, expected a"):
        GenerationSettings(**{field: bad})


@pytest.mark.parametrize("field", INTEGERS)
def test_a_fraction_is_no_integer(field: str) -> None:
    with pytest.raises(PromptError, match=f"^{field} is 1.5, expected an integer from"):
        GenerationSettings(**{field: 1.5})


def test_numpy_numbers_are_kept_as_pythons() -> None:
    settings = GenerationSettings(
        max_new_tokens=np.int32(7),  # type: ignore[arg-type]
        top_k=np.uint8(3),  # type: ignore[arg-type]
        seed=np.int64(2**32 - 1),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        min_p=np.float64(0.25),
        presence_penalty=2,
        stop=["a"],  # type: ignore[arg-type]
    )
    assert settings == GenerationSettings(7, 0, 0.5, 3, 1.0, 0.25, 1.0, 2.0, 2**32 - 1, ("a",))
    assert {type(getattr(settings, name)) for name in INTEGERS} == {int}
    assert {type(getattr(settings, name)) for name in NUMBERS} == {float}


def test_every_setting_that_is_accepted_fits_the_devices_types() -> None:
    extreme = GenerationSettings(temperature=3e38, top_k=2**31 - 1, seed=2**32 - 1, top_p=1e-30)
    arrays = stack_settings([extreme], [2**32 - 1])
    assert arrays.top_k[0] == 2**31 - 1
    assert int(arrays.seed[0]) == 2**32 - 1
    assert all(np.isfinite(array[0]) for array in arrays)
    assert arrays.top_p[0] > 0


def test_min_new_tokens_above_max_new_tokens_is_refused() -> None:
    with pytest.raises(PromptError, match="min_new_tokens is 5, more than max_new_tokens = 4"):
        GenerationSettings(min_new_tokens=5, max_new_tokens=4)


def write(folder: Path, content: dict[str, Any]) -> None:
    (folder / "generation_config.json").write_text(json.dumps(content))


def test_generation_config_counts_where_it_asks_for_sampling(tmp_path: Path) -> None:
    file = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}
    assert recommended_settings(tmp_path) == recommended_settings(None) == GenerationSettings()
    write(tmp_path, file)
    assert recommended_settings(tmp_path) == GenerationSettings(temperature=0.7, top_k=20, top_p=0.95)
    write(tmp_path, file | {"do_sample": False, "repetition_penalty": 1.1})
    assert recommended_settings(tmp_path) == GenerationSettings(repetition_penalty=1.1)
    write(tmp_path, {"do_sample": True, "top_k": None})
    assert recommended_settings(tmp_path) == GenerationSettings(temperature=1.0)


def test_what_is_given_overrules_what_is_recommended(tmp_path: Path) -> None:
    write(tmp_path, {"do_sample": True, "temperature": 0.7, "top_k": 20})
    given = recommended_settings(tmp_path, temperature=0, top_p=None, seed=3, ignore_eos=True)
    assert given == GenerationSettings(temperature=0.0, top_k=20, seed=3, ignore_eos=True)
    with pytest.raises(PromptError, match="top_k is -1"):
        recommended_settings(tmp_path, top_k=-1)


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("temperature", "hot"),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", [0.9]),
        ("min_p", 2),
        ("repetition_penalty", {}),
        ("do_sample", "false"),
        ("do_sample", 1),
    ],
)
def test_a_malformed_field_of_generation_config_names_file_and_field(
    tmp_path: Path, field: str, bad: Any
) -> None:
    for samples in (True, False):
        write(tmp_path, {"do_sample": samples, field: bad})
        with pytest.raises(CheckpointError) as caught:
            recommended_settings(tmp_path)
        file = tmp_path / "generation_config.json"
        assert str(caught.value).startswith(f"{file}: {field} is {bad!r}, expected ")
