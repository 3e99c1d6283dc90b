from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_jax.inference.streaming import AnswerText, Detokenizer, StopStringFilter
from tests.inference.conftest import FamilyTokenizer

TEXTS = [
    "plain ASCII, then naïve café",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 in a row 🧑🏽‍🚀",
    "毕老师说：你好，世界！龘靐齉",
    "नमस्ते สวัสดี Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤ combining",
    "𝒳𐍈🜁 rare planes",
]


def stream(family: FamilyTokenizer, tokens: list[int]) -> tuple[list[str], str]:
    detokenizer = Detokenizer(family.tokenizer)
    return [detokenizer.push(token) for token in tokens], detokenizer.flush()


def bytewise(family: FamilyTokenizer, text: str) -> list[int]:
    """One token per byte: the hardest way to spell a text."""
    single = {token: rank for rank, token in family.bytes_of.items() if len(token) == 1}
    return [single[bytes([byte])] for byte in text.encode()]


@pytest.mark.parametrize("text", TEXTS)
def test_b91_streamed_pieces_add_up_and_hold_no_broken_characters(family: FamilyTokenizer, text: str) -> None:
    for tokens in (family.encode(text), bytewise(family, text)):
        pieces, rest = stream(family, tokens)
        assert "\ufffd" not in "".join(pieces)
        assert rest == ""
        assert "".join(pieces) == family.tokenizer.decode(tokens)
    assert "".join(pieces) == text


def test_b91_a_character_cut_off_by_the_length_is_flushed_once(family: FamilyTokenizer) -> None:
    tokens = bytewise(family, "ab😀")[:-1]
    pieces, rest = stream(family, tokens)
    assert "".join(pieces) == "ab"
    assert rest == "\ufffd"
    assert "".join(pieces) + rest == family.tokenizer.decode(tokens)


def test_b91_any_tokens_at_all_stream_to_their_full_decoding(family: FamilyTokenizer) -> None:
    """Random ids, half of them single bytes: a model in training produces such things."""
    source = random.Random(0)
    single = [rank for rank, token in family.bytes_of.items() if len(token) == 1 and token > b"\x7f"]
    for _ in range(500):
        tokens = [
            source.choice(single) if source.random() < 0.5 else source.randrange(248_077) for _ in range(12)
        ]
        pieces, rest = stream(family, tokens)
        assert "".join(pieces) + rest == family.tokenizer.decode(tokens)


def test_b91_special_tokens_do_not_show_and_thoughts_do(family: FamilyTokenizer) -> None:
    tokens = [248_045, *family.encode("<think>"), 248_046]
    pieces, rest = stream(family, tokens)
    assert "".join(pieces) + rest == "<think>"


def first_stop(text: str, stops: list[str]) -> str:
    """The definition: read characters one by one until a stop string is complete."""
    for end in range(1, len(text) + 1):
        complete = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(complete)]
    return text


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=10),
)
def test_b91_stop_strings_are_found_whatever_the_token_edges(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    stop_filter = StopStringFilter(stops)
    shown, stopped = "", False
    for begin, end in itertools.pairwise(edges):
        released = stop_filter.push(text[begin:end])
        shown += released.text
        assert text.startswith(shown)
        if stopped := released.stopped:
            break
    if not stopped:
        shown += stop_filter.flush()
    assert shown == first_stop(text, stops)
    assert stopped == any(stop in text for stop in stops)


def test_text_that_can_be_no_stop_string_is_not_held_back() -> None:
    stop_filter = StopStringFilter(["\nUser:"])
    assert stop_filter.push("Hello\nUs").text == "Hello"
    assert stop_filter.push("ually").text == "\nUsually"


def test_b91_stop_string_across_tokens_of_the_family(family: FamilyTokenizer) -> None:
    answer = AnswerText(family.tokenizer, stop=["世界"])
    tokens = bytewise(family, "你好世界再见")
    shown = ""
    for token in tokens:
        shown += answer.push(token)
        if answer.stopped:
            break
    assert answer.stopped
    assert shown + answer.flush() == answer.text == "你好"


def test_a_stop_string_may_be_completed_by_the_flush(family: FamilyTokenizer) -> None:
    answer = AnswerText(family.tokenizer, stop=["b\ufffd"])
    shown = "".join(answer.push(token) for token in bytewise(family, "ab😀")[:-1])
    assert not answer.stopped
    assert shown + answer.flush() == "a"
    assert answer.stopped
    assert answer.flush() == ""


def test_hidden_ids_do_not_show(family: FamilyTokenizer) -> None:
    a, b = family.encode("a")[0], family.encode("b")[0]
    answer = AnswerText(family.tokenizer, hidden=[b])
    assert [answer.push(a), answer.push(b)] == ["a", ""]
    assert answer.text == "a"
