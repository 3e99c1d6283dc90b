"""Constraints behind thoughts: free until their tag has come, however it is spelled, and then held."""

from __future__ import annotations

import json
import random

import pytest

from qwen35_jax.inference.chat.answer_parser import parse_answer
from qwen35_jax.inference.constraint import Constraint
from tests.inference.grammars.walks import COMPILER, STOP_IDS, TOKENIZER, accepts, allowed_tokens, random_text

TAG = "</think>"


def constraint() -> Constraint:
    return COMPILER.after_thought(COMPILER.json_schema({"type": "integer", "minimum": 1, "maximum": 99}))


@pytest.mark.parametrize("seed", range(10))
def test_walks_end_in_thoughts_and_an_answer_that_keeps_to_the_schema(seed: int) -> None:
    answer = parse_answer(random_text(constraint(), random.Random(seed)), in_thought=True)
    assert 1 <= json.loads(answer.content) <= 99


def test_thoughts_hold_any_text_and_have_to_be_closed() -> None:
    walk = constraint()
    for token in TOKENIZER.encode('Hm: </ thinks {"a"}\n\n<tool_call> é 🙂 </thin'):
        allowed = allowed_tokens(walk)
        assert token in allowed
        assert not allowed & set(STOP_IDS)
        walk.accept(token)


@pytest.mark.parametrize("thought", ["", "\n\n", "Hm.\n", "a </think", "<think>"])
def test_the_answer_is_held_from_the_first_tag_on(thought: str) -> None:
    assert accepts(constraint(), f"{thought}{TAG}\n\n42")
    assert not accepts(constraint(), f"{thought}{TAG}\n\nx")
    assert not accepts(constraint(), f"{thought}{TAG}42")
    assert not accepts(constraint(), f"{thought}{TAG}\n\n42{TAG}\n\n42")
    assert not accepts(constraint(), thought)


def test_a_tag_that_is_spelled_closes_the_thoughts_as_well() -> None:
    walk = constraint()
    spelled = [token for piece in ("Hm", "</", "th", "in", "k", ">") for token in TOKENIZER.encode(piece)]
    assert TOKENIZER.token_id(TAG) not in spelled
    assert TOKENIZER.decode(spelled) == f"Hm{TAG}"
    for token in spelled:
        assert token in allowed_tokens(walk)
        walk.accept(token)
    line_break = TOKENIZER.encode("\n")[0]
    after = {TOKENIZER.decode([token]) for token in allowed_tokens(walk)}
    assert after <= {"\n", "\n\n"}
    walk.accept(line_break)
    assert {TOKENIZER.decode([token]) for token in allowed_tokens(walk)} == {"\n"}
    walk.accept(line_break)
    assert all(TOKENIZER.decode([token])[0] in "123456789" for token in allowed_tokens(walk))


def test_calls_follow_thoughts() -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    walk = COMPILER.after_thought(COMPILER.tool_calls(tools))
    text = f"Let me look.\n{TAG}\n\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
    assert accepts(walk, text)
    assert parse_answer(text, tools, in_thought=True).tool_calls


def test_a_copy_walks_alone_from_where_it_was_made() -> None:
    walk = COMPILER.after_thought(COMPILER.json_schema({"const": 12}))
    for token in TOKENIZER.encode("Hm.\n</think>\n\n1"):
        walk.accept(token)
    copied = walk.copy()
    (two,) = TOKENIZER.encode("2")
    walk.accept(two)
    assert allowed_tokens(walk) == set(STOP_IDS)
    assert allowed_tokens(copied) == {two}
