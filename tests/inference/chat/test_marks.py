"""Marks: told from everything that stands in a conversation, and gone without a trace."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_jax.errors import PromptError
from qwen35_jax.inference.chat.marks import MARKS, map_texts, texts, unused_marks, without_mark

VALUE = {"a": ["b", ("c", {"d": "e", "f": 3})], "g": None}


def test_texts_are_all_of_a_value_keys_among_them() -> None:
    assert list(texts(VALUE)) == ["a", "b", "c", "d", "e", "f", "g"]
    assert map_texts(str.upper, VALUE) == {"A": ["B", ("C", {"D": "E", "F": 3})], "G": None}


@given(st.sets(st.sampled_from(MARKS), max_size=len(MARKS) - 2), st.booleans())
def test_marks_that_a_value_holds_are_not_used(held: set[str], escaped: bool) -> None:
    text = "".join(sorted(held))
    chosen = unused_marks([{"key": json.dumps(text) if escaped else text}], 2)
    assert len(set(chosen)) == 2
    assert not held & set(chosen)


def test_a_value_that_holds_too_many_marks_is_refused() -> None:
    with pytest.raises(PromptError, match="31 of the 32 characters to which Unicode gives no meaning"):
        unused_marks("".join(MARKS[1:]), 2)


@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_mark_is_taken_out_of_text_and_of_json(ascii_only: bool) -> None:
    mark = MARKS[3]
    written = json.dumps(f"caf{mark}\u00e9", ensure_ascii=ascii_only)
    assert without_mark(f"x{mark}y {written}", mark) == "xy " + json.dumps(
        "caf\u00e9", ensure_ascii=ascii_only
    )
