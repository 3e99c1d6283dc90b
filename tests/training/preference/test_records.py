"""Lines of preference data: every form in which they are found, and how what is none is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qwen35_jax.training.preference.records import Comparison, read_comparisons
from qwen35_jax.training.records import Chat, Completion, DataError, Text

SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "2 + 2?"}
GOOD = {"role": "assistant", "content": "4"}
BAD = {"role": "assistant", "content": "5"}
AGAIN = {"role": "user", "content": "Sure?"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def read(folder: Path, *lines: Any) -> list[Comparison]:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return [record.content for record in read_comparisons(path)]


def chats(good: list, bad: list, shared: int, tools: list | None = None) -> Comparison:
    return Comparison(Chat(good, tools), Chat(bad, tools), shared)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"},
            Comparison(Completion("2 + 2 =", " 4"), Completion("2 + 2 =", " 5")),
        ),
        ({"chosen": "A: 4", "rejected": "A: 5"}, Comparison(Text("A: 4"), Text("A: 5"))),
        (
            {"prompt": [SYSTEM, QUESTION], "chosen": [GOOD], "rejected": [BAD, AGAIN, GOOD], "tools": [TOOL]},
            chats([SYSTEM, QUESTION, GOOD], [SYSTEM, QUESTION, BAD, AGAIN, GOOD], 2, [TOOL]),
        ),
        (
            {"prompt": [QUESTION], "chosen": "4", "rejected": [BAD], "messages": []},
            chats([QUESTION, GOOD], [QUESTION, BAD], 1),
        ),
        (
            {"prompt": "2 + 2?", "chosen": [GOOD], "rejected": [BAD]},
            chats([QUESTION, GOOD], [QUESTION, BAD], 1),
        ),
        (
            {"chosen": [QUESTION, GOOD, AGAIN, GOOD], "rejected": [QUESTION, GOOD, AGAIN, BAD]},
            chats([QUESTION, GOOD, AGAIN, GOOD], [QUESTION, GOOD, AGAIN, BAD], 3),
        ),
        (
            {"prompt": "2 + 2?", "chosen": [SYSTEM, QUESTION, GOOD], "rejected": [SYSTEM, QUESTION, BAD]},
            chats([SYSTEM, QUESTION, GOOD], [SYSTEM, QUESTION, BAD], 2),
        ),
        (
            {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, GOOD]},
            chats([QUESTION, GOOD], [QUESTION, GOOD], 2),
        ),
    ],
)
def test_every_form_is_read(tmp_path: Path, line: dict[str, Any], expected: Comparison) -> None:
    assert read(tmp_path, line) == [expected]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ({"prompt": "a", "chosen": "b"}, "has the fields 'prompt', 'chosen', expected chosen and rejected"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "expected chosen and rejected, and mostly prompt"),
        ([1], "expected a JSON object with chosen and rejected"),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, "prompt is 3, expected a list of messages"),
        ({"prompt": "a", "chosen": [], "rejected": [BAD]}, "chosen is empty"),
        (
            {"prompt": "a", "chosen": [GOOD], "rejected": [BAD | {"role": "robot"}]},
            r"rejected\[0\].role is 'robot'",
        ),
        ({"chosen": [GOOD], "rejected": [BAD]}, "chosen begins with .* assistant, and there is no prompt"),
        (
            {"prompt": "a", "chosen": [QUESTION, GOOD], "rejected": [BAD]},
            "chosen begins with a message of the user and rejected with one of the assistant",
        ),
        (
            {"chosen": [QUESTION, GOOD], "rejected": [AGAIN, BAD]},
            r"differ in chosen\[0\], which is not the assistant's",
        ),
        ({"prompt": [QUESTION, GOOD], "chosen": [GOOD], "rejected": [BAD]}, "prompt ends with .* assistant"),
        ({"prompt": "a", "chosen": [GOOD], "rejected": [BAD], "tools": [{}]}, r"tools\[0\].name is missing"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: Any, complaint: str) -> None:
    good = {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}
    with pytest.raises(DataError, match=f"line 3.*{complaint}"):
        read(tmp_path, good, good, line, good)
