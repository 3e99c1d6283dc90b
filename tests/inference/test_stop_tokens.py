from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qwen35_jax.errors import PromptError
from qwen35_jax.inference.stop_tokens import chat_stop_token_ids, parse_token_ids, stop_token_ids
from qwen35_jax.inference.tokenizer import Tokenizer


def write_generation_config(folder: Path, **fields: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize(("value", "expected"), [(7, (7,)), ([9, 7, 9], (7, 9))])
def test_b90_eos_of_generation_config_may_be_one_id_or_a_list(
    tmp_path: Path, value: Any, expected: tuple[int, ...]
) -> None:
    write_generation_config(tmp_path, eos_token_id=value)
    assert stop_token_ids(tmp_path, config_ids=(3,)) == expected


def test_b90_generation_config_over_config_over_tokenizer(tmp_path: Path, ascii_tokenizer: Tokenizer) -> None:
    write_generation_config(tmp_path, temperature=1.0)
    assert stop_token_ids(tmp_path, config_ids=(5, 3), tokenizer=ascii_tokenizer) == (3, 5)
    assert stop_token_ids(tmp_path, tokenizer=ascii_tokenizer) == (ascii_tokenizer.eos_token_id,)
    assert stop_token_ids(None, config_ids=(3,)) == (3,)
    assert stop_token_ids(tmp_path) == ()
    write_generation_config(tmp_path, eos_token_id=[8])
    assert stop_token_ids(tmp_path, config_ids=(5, 3), tokenizer=ascii_tokenizer) == (8,)


@pytest.mark.parametrize("value", ["7", 7.0, True, [7, None], -1, [-1], 2**31, {"a": 1}, [[7]]])
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(PromptError, match=r"eos_token_id is .*, expected a token id or a list"):
        parse_token_ids(value, "eos_token_id")


def test_b90_a_chat_also_ends_where_a_turn_does(tmp_path: Path, ascii_tokenizer: Tokenizer) -> None:
    end_of_turn = ascii_tokenizer.token_id("<|im_end|>")
    assert end_of_turn == 95
    write_generation_config(tmp_path, eos_token_id=[8])
    assert chat_stop_token_ids(tmp_path, config_ids=(5,), tokenizer=ascii_tokenizer) == (8, 95)
    assert chat_stop_token_ids(None, config_ids=(5, 95), tokenizer=ascii_tokenizer) == (5, 95)
    # A base model's tokenizer names another end; its template still ends turns with the same token.
    base = Tokenizer(ascii_tokenizer.backend, {"eos_token": "A"})
    assert chat_stop_token_ids(tmp_path, tokenizer=base) == (8, base.token_id("A"), 95)
    assert chat_stop_token_ids(tmp_path, tokenizer=Tokenizer(ascii_tokenizer.backend)) == (8, 95)


def test_a_malformed_generation_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(PromptError, match=r"generation_config.json cannot be read as JSON"):
        stop_token_ids(tmp_path)
