"""Batches: the same run whatever was interrupted and however many processes share it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from qwen35_jax.errors import ConfigError
from qwen35_jax.training.batches import Batches, single_pass
from qwen35_jax.training.document import Document
from qwen35_jax.training.objective import Batch
from qwen35_jax.training.packing import PackedRows
from qwen35_jax.training.records import DataError

ROW, COUNT = 7, 11


def packed_rows(count: int = COUNT, first: int = 0) -> PackedRows:
    """Rows that hold one document each, of which every token is the number of the document."""
    return PackedRows(
        [
            Document(np.full(5, first + number, np.int32), np.array([False, False, True, True, True]))
            for number in range(count)
        ],
        ROW,
        pad_id=99,
    )


def numbers(batches: list[Batch]) -> list[int]:
    return [int(row[0]) for batch in batches for row in np.asarray(batch.tokens).reshape(-1, ROW)]


def steps(stream: Batches, count: int) -> list[Batch]:
    return list(itertools.islice(stream, count))


def equal(left: list[Batch], right: list[Batch]) -> bool:
    return len(left) == len(right) and all(
        np.array_equal(*fields)
        for pair in zip(left, right, strict=True)
        for fields in zip(*pair, strict=True)
    )


def part_of(rows: int, index: int, count: int) -> np.ndarray:
    """The rows of a process that holds neighbours."""
    return np.arange(rows).reshape(count, -1)[index]


def joined(parts: Iterable[Sequence[Batch]]) -> list[Batch]:
    """The global batches whose rows processes share."""
    batches = []
    for each in zip(*parts, strict=True):
        fields: list[Any] = [np.concatenate(field, axis=1) for field in zip(*each, strict=True)]
        batches.append(Batch(*fields))
    return batches


def test_a_step_has_micro_batches_of_rows_with_their_segments_and_weights() -> None:
    (batch,) = steps(Batches(packed_rows(), micro_batches=3, rows=2, seed=0), 1)
    assert {field.shape for field in batch} == {(3, 2, ROW)}
    assert [str(field.dtype) for field in batch] == ["int32", "int32", "float32"]
    assert (np.asarray(batch.segment_ids) == [1, 1, 1, 1, 1, 0, 0]).all()
    assert (np.asarray(batch.weights) == [0, 0, 1, 1, 1, 0, 0]).all()


def test_every_epoch_holds_every_row_once_in_another_order() -> None:
    drawn = numbers(steps(Batches(packed_rows(), micro_batches=1, rows=2, seed=4), COUNT))
    first, second = drawn[:COUNT], drawn[COUNT:]
    assert sorted(first) == sorted(second) == list(range(COUNT))
    assert first != second
    assert first != list(range(COUNT))
    assert Batches(packed_rows(), micro_batches=1, rows=2, seed=4).steps_per_epoch == COUNT / 2


def test_without_a_seed_every_epoch_has_the_rows_as_they_follow_each_other() -> None:
    def stream() -> Batches:
        return Batches(packed_rows(), micro_batches=1, rows=3, seed=None)

    drawn = numbers(steps(stream(), COUNT))
    assert drawn == [*range(COUNT)] * 3
    first, second = stream(), stream()
    steps(first, 5)
    second.set_state(json.loads(json.dumps(first.get_state())))
    assert numbers(steps(second, 2)) == drawn[15:21]


def test_the_seed_alone_decides_the_order() -> None:
    def order(seed: int) -> list[int]:
        return numbers(steps(Batches(packed_rows(), micro_batches=1, rows=3, seed=seed), 5))

    assert order(4) == order(4)
    assert order(4) != order(5)


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_together_have_the_batch_of_one(processes: int) -> None:
    def stream(index: int, count: int) -> Batches:
        return Batches(packed_rows(), micro_batches=2, rows=6, seed=1, held=part_of(6, index, count))

    whole = steps(stream(0, 1), 4)
    parts = [steps(stream(index, processes), 4) for index in range(processes)]
    assert equal(joined(parts), whole)
    assert all(batch.tokens.shape == (2, 6 // processes, ROW) for part in parts for batch in part)


def test_rows_that_a_process_holds_need_not_be_neighbours_or_its_alone() -> None:
    def step(held: list[int] | None) -> Batch:
        chosen = None if held is None else np.array(held)
        return next(Batches(packed_rows(), micro_batches=2, rows=4, seed=1, held=chosen))

    whole = step(None)
    for held in ([0, 2], [1, 3], [0, 1, 2, 3]):
        for field, part in zip(whole, step(held), strict=True):
            np.testing.assert_array_equal(part, np.asarray(field)[:, held])


def test_micro_batches_cut_a_step_and_change_nothing_in_it() -> None:
    one, three = (
        numbers(steps(Batches(packed_rows(), micro_batches=micro, rows=6 // micro, seed=1), 4))
        for micro in (1, 3)
    )
    assert one == three


@pytest.mark.parametrize("done", [0, 1, 5])
def test_a_stream_that_is_restored_goes_on_as_if_nothing_had_happened(done: int) -> None:
    stream = Batches(packed_rows(), micro_batches=2, rows=2, seed=3)
    steps(stream, done)
    state = json.loads(json.dumps(stream.get_state()))
    expected = steps(stream, 4)
    other = Batches(packed_rows(), micro_batches=2, rows=2, seed=3)
    steps(other, 2)
    other.set_state(state)
    assert equal(steps(other, 4), expected)
    other.set_state(state)  # and once more, with steps made ahead
    assert other.get_state() == state
    assert equal(steps(other, 4), expected)


def test_a_position_saved_by_one_process_is_one_for_several() -> None:
    stream = Batches(packed_rows(), micro_batches=1, rows=4, seed=3)
    steps(stream, 2)
    state = stream.get_state()
    whole = steps(stream, 2)
    parts = []
    for index in range(2):
        part = Batches(packed_rows(), micro_batches=1, rows=4, seed=3, held=part_of(4, index, 2))
        part.set_state(state)
        assert part.get_state() == state
        parts.append(steps(part, 2))
    assert equal(joined(parts), whole)


def test_a_position_in_other_data_is_refused_by_what_differs() -> None:
    state = Batches(packed_rows(), micro_batches=2, rows=2, seed=3).get_state()
    for other, name in (
        (Batches(packed_rows(first=1), micro_batches=2, rows=2, seed=3), "data"),
        (Batches(packed_rows(), micro_batches=2, rows=2, seed=4), "seed"),
        (Batches(packed_rows(), micro_batches=2, rows=2, seed=None), "seed"),
        (Batches(packed_rows(), micro_batches=2, rows=3, seed=3), "rows_per_step"),
    ):
        with pytest.raises(DataError, match=f"saved position in the data has {name} "):
            other.set_state(state)


def test_a_data_set_smaller_than_a_step_comes_again_within_it() -> None:
    (batch,) = steps(Batches(packed_rows(2), micro_batches=1, rows=5, seed=0), 1)
    assert sorted(numbers([batch])[:4]) == [0, 0, 1, 1]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_single_pass_has_every_row_once_in_order_and_then_padding(processes: int) -> None:
    parts = [
        list(single_pass(packed_rows(), micro_batches=2, rows=4, held=part_of(4, index, processes)))
        for index in range(processes)
    ]
    batches = joined(parts)
    assert [batch.tokens.shape for batch in batches] == [(2, 4, ROW)] * 2
    assert numbers(batches) == [*range(COUNT), *[99] * 5]
    real = np.concatenate([np.asarray(batch.segment_ids).reshape(-1, ROW) for batch in batches]).any(axis=1)
    weighed = np.concatenate([np.asarray(batch.weights).reshape(-1, ROW) for batch in batches]).any(axis=1)
    assert real.tolist() == weighed.tolist() == [True] * COUNT + [False] * 5


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"micro_batches": 0}, "micro_batches is 0, expected at least 1"),
        ({"rows": 0}, "rows is 0, expected at least 1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_numbers_out_of_range_are_refused(settings: dict[str, Any], complaint: str) -> None:
    usable: dict[str, Any] = {"micro_batches": 1, "rows": 6, "seed": 0}
    with pytest.raises(ConfigError, match=complaint):
        Batches(packed_rows(), **usable | settings)


def test_no_rows_make_no_batches() -> None:
    with pytest.raises(DataError, match="no rows"):
        Batches(packed_rows(0), micro_batches=1, rows=1, seed=0)
