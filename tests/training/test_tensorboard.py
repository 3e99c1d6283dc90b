"""TensorBoard's files have the numbers of the lines, and after a resume each step once."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from qwen35_jax.training.tensorboard import TensorBoardFile


def events(folder: Path) -> list[Event]:
    """The records of all files, oldest first."""
    found = []
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            found.append(Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
    return found


def test_every_number_stands_under_its_name_and_step(tmp_path: Path) -> None:
    file = TensorBoardFile(tmp_path / "board", after=0)
    file.append({"step": 3, "loss": 1.5, "accuracy": 0.25, "seconds": 9.0})
    file.append({"step": 4, "answers": [{"question": "2 + 2 =", "answer": "4"}]})
    file.close()
    values = [(event.step, value) for event in events(tmp_path / "board") for value in event.summary.value]
    assert [(step, value.tag) for step, value in values][:2] == [(3, "loss"), (3, "accuracy")]
    assert [value.simple_value for _, value in values[:2]] == [1.5, 0.25]
    ((step, text),) = [(step, value) for step, value in values if "answers" in value.tag]
    assert step == 4 and text.tensor.string_val == [b"**2 + 2 =** 4"]
    assert not any(value.tag == "seconds" for _, value in values)


def test_a_run_that_goes_on_hides_the_steps_that_it_does_again(tmp_path: Path) -> None:
    first = TensorBoardFile(tmp_path / "board", after=0)
    for step in (1, 2, 3):
        first.append({"step": step, "loss": float(step)})
    first.close()
    again = TensorBoardFile(tmp_path / "board", after=2)
    again.append({"step": 3, "loss": 30.0})
    again.close()
    starts = [event.step for event in events(tmp_path / "board") if event.HasField("session_log")]
    assert sorted(starts) == [1, 3]  # where TensorBoard drops what an earlier file has from this step on


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        TensorBoardFile(tmp_path / "file" / "board", after=0)
