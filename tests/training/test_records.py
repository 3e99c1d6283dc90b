"""Lines of training data: what is accepted, and how what is not is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qwen35_jax.training.records import Chat, Completion, DataError, Parts, Text, read_records

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}


def write(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "data.jsonl"
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    return path


def test_every_form_is_read_with_its_place(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "\ufeff" + json.dumps({"messages": MESSAGES, "tools": [TOOL], "id": 3}),
        "",
        " \t\r",
        json.dumps({"prompt": "2 + 2 =", "completion": " 4"}),
        json.dumps({"text": "Once upon\u2028a time"}, ensure_ascii=False),
        json.dumps({"messages": MESSAGES, "tools": None, "text": "not looked at"}),
        json.dumps({"parts": [["Once ", 0], ["upon", 2.5]]}),
    )
    records = read_records(path)
    assert [record.content for record in records] == [
        Chat(MESSAGES, [TOOL]),
        Completion("2 + 2 =", " 4"),
        Text("Once upon\u2028a time"),
        Chat(MESSAGES, None),
        Parts((("Once ", 0.0), ("upon", 2.5))),
    ]
    assert [record.place for record in records] == [f"{path}, line {number}" for number in (1, 4, 5, 6, 7)]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"text": "cut', r"is no JSON: .*; found '\{\"text\": \"cut', expected an object with messages"),
        ("[" * 100_000, "is no JSON"),
        ('{"text": "a", "score": NaN}', "NaN is no JSON number"),
        ('"text"', r"is 'text', expected a JSON object with messages, or prompt and completion, or text"),
        ('{"prompt": "a", "chosen": "b"}', r"has the fields 'prompt', 'chosen', expected messages"),
        ("{}", "has the fields none, expected messages"),
        ('{"text": 5}', "text is 5, expected a text"),
        ('{"prompt": "a", "completion": null}', "completion is None, expected a text"),
        ('{"parts": []}', r"parts is \[\], expected a list of pairs"),
        ('{"parts": "Hi"}', "parts is 'Hi', expected a list of pairs"),
        ('{"parts": [["a", 1], ["b"]]}', r"parts\[1\] is \['b'\], expected a text and its weight"),
        ('{"parts": [["a", true]]}', r"parts\[0\] is \['a', True\]"),
        ('{"parts": [["a", -1]]}', r"parts\[0\] is \['a', -1\]"),
        ('{"parts": [["a", 1e999]]}', r"parts\[0\] is \['a', inf\]"),
        ('{"messages": "Hi"}', "messages is 'Hi', expected a list of messages"),
        ('{"messages": []}', "messages is empty"),
        ('{"messages": [{"role": "robot", "content": "Hi"}]}', r"messages\[0\].role is 'robot'"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\].content is missing"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}', r"tools\[0\].name is missing"),
        (rb'{"text": "half \ud83d"}', "half of a surrogate pair"),
        (
            b'{"text": "caf\xe9"}',
            r"is not UTF-8 text \(byte 13 of the line is 0xe9\): save the file as UTF-8",
        ),
    ],
)
def test_a_malformed_line_17_is_named(tmp_path: Path, line: str | bytes, complaint: str) -> None:
    good = json.dumps({"text": "a"})
    path = write(tmp_path, *[good] * 9, "", *[good] * 6, line, good)
    with pytest.raises(DataError, match=complaint) as caught:
        read_records(path)
    assert str(caught.value).startswith(f"{path}, line 17")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("line", [rb'{"text": "\ud83d\ude00"}', '{"text": "\U0001f600"}'])
def test_a_pair_of_surrogates_is_a_character(tmp_path: Path, line: str | bytes) -> None:
    assert read_records(write(tmp_path, line))[0].content == Text("\U0001f600")


def test_a_file_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.jsonl holds no record, expected lines of JSON with messages"):
        read_records(write(tmp_path, "", " "))


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent.jsonl cannot be read: No such file"):
        read_records(tmp_path / "absent.jsonl")
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        read_records(tmp_path)
