from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen35_jax.errors import PromptError
from qwen35_jax.inference.tokenizer import Tokenizer, check_token_ids


def save(tokenizer: Tokenizer, folder: Path, **config: Any) -> None:
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_reads_a_folder(tmp_path: Path, ascii_tokenizer: Tokenizer) -> None:
    save(ascii_tokenizer, tmp_path, eos_token="<|im_end|>")
    loaded = Tokenizer.from_folder(tmp_path)
    assert loaded.encode("Hi!") == [40, 73, 1]
    assert loaded.decode([40, 73, 1, 95]) == "Hi!"
    assert loaded.decode([40, 95], skip_special_tokens=False) == "H<|im_end|>"
    assert loaded.vocabulary_size == 96
    assert loaded.eos_token_id == 95


def test_eos_token_may_be_written_as_an_object_or_be_absent(
    tmp_path: Path, ascii_tokenizer: Tokenizer
) -> None:
    save(ascii_tokenizer, tmp_path, eos_token={"content": "<|im_end|>", "special": True})
    assert Tokenizer.from_folder(tmp_path).eos_token_id == 95
    save(ascii_tokenizer, tmp_path, eos_token=None)
    assert Tokenizer.from_folder(tmp_path).eos_token_id is None
    save(ascii_tokenizer, tmp_path, eos_token="<|unknown|>")
    assert Tokenizer.from_folder(tmp_path).eos_token_id is None


def test_names_of_special_tokens_in_a_text_are_those_tokens_unless_asked_otherwise(
    ascii_tokenizer: Tokenizer,
) -> None:
    assert ascii_tokenizer.encode("a<|im_end|>") == [65, 95]
    literal = ascii_tokenizer.encode("a<|im_end|>", special_tokens=False)
    assert 95 not in literal
    assert ascii_tokenizer.decode(literal) == "a<|im_end|>"
    assert ascii_tokenizer.encode("a<|im_end|>") == [65, 95]  # the choice was for that call


def test_reading_names_as_characters_changes_nothing_that_other_threads_see(
    ascii_tokenizer: Tokenizer,
) -> None:
    before = ascii_tokenizer.backend.to_str()
    literal = ascii_tokenizer.encode("a<|im_end|>", special_tokens=False)
    assert not ascii_tokenizer.backend.encode_special_tokens
    assert ascii_tokenizer.backend.to_str() == before
    assert ascii_tokenizer.encode("a<|im_end|>", special_tokens=False) == literal


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path, ascii_tokenizer: Tokenizer) -> None:
    save(ascii_tokenizer, tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["truncation"] = {
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
        "direction": "Right",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert len(Tokenizer.from_folder(tmp_path).encode("abcde")) == 5


def test_a_folder_without_tokenizer_points_to_prompt_ids(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"has no tokenizer.json.*--prompt-ids"):
        Tokenizer.from_folder(tmp_path)


def test_a_broken_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(PromptError, match=r"tokenizer.json is not a tokenizer"):
        Tokenizer.from_folder(tmp_path)


def test_token_ids_are_integers_of_the_embedding() -> None:
    assert check_token_ids(np.array([0, 96], np.int64), 97) == [0, 96]
    with pytest.raises(PromptError, match="prompt token 1 is 97, expected an id from 0 to 96"):
        check_token_ids([3, 97], 97)
    with pytest.raises(PromptError, match="prompt token 0 is -1"):
        check_token_ids([-1], 97)
    for bad in ("x", None, 1.5, True):
        with pytest.raises(PromptError, match="expected an integer"):
            check_token_ids([bad], 97)  # type: ignore[list-item]
