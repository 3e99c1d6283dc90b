"""Packing: nothing is lost, doubled, split or mixed, and little is padding."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_jax.ops.segments import positions
from qwen35_jax.training.document import Document
from qwen35_jax.training.packing import PackedRows, pack, pack_in_order
from qwen35_jax.training.records import DataError

ROW = 23
LENGTHS = st.lists(st.integers(1, ROW), min_size=1, max_size=60)


def documents(lengths: list[int]) -> list[Document]:
    """Documents whose tokens are all different, the first of each left out of what is learned."""
    starts = np.cumsum([0, *lengths])
    return [
        Document(np.arange(start, start + length, dtype=np.int32), np.arange(length) % 3 == 1)
        for start, length in zip(starts, lengths, strict=False)
    ]


@given(LENGTHS)
def test_every_token_of_every_document_stands_in_the_rows_once_with_its_weight(lengths: list[int]) -> None:
    given_documents = documents(lengths)
    packed = PackedRows(given_documents, ROW, pad_id=7)
    found: dict[int, float] = {}
    for index in range(len(packed)):
        row = packed[index]
        assert {field.shape for field in row} == {(ROW,)}
        real = row.segment_ids > 0
        assert not (set(row.tokens[real].tolist()) & found.keys())
        found |= dict(zip(row.tokens[real].tolist(), row.weights[real].tolist(), strict=True))
        assert (row.tokens[~real] == 7).all()
        assert not row.weights[~real].any()
    expected = {
        int(token): float(trained)
        for document in given_documents
        for token, trained in zip(*document, strict=True)
    }
    assert found == expected


@given(LENGTHS)
def test_b08_documents_stand_whole_and_numbered_before_the_padding(lengths: list[int]) -> None:
    given_documents = documents(lengths)
    packed = PackedRows(given_documents, ROW)
    whole = {tuple(document.tokens.tolist()) for document in given_documents}
    seen = 0
    for index in range(len(packed)):
        row = packed[index]
        numbers = row.segment_ids[row.segment_ids > 0]
        assert row.segment_ids[: len(numbers)].all()
        count = int(numbers.max())
        # 1, 2, 3 and so on, so neighbours differ.
        assert (np.diff(numbers) >= 0).all() and set(numbers.tolist()) == set(range(1, count + 1))
        for number in range(1, count + 1):
            assert tuple(row.tokens[row.segment_ids == number].tolist()) in whole
        seen += count
    assert seen == len(given_documents)


def test_b10_segments_count_from_one_in_every_row_and_positions_from_zero_in_every_document() -> None:
    packed = PackedRows(documents([3, 4, 8]), 8)
    segment_ids = np.stack([packed[index].segment_ids for index in range(2)])
    assert segment_ids.tolist() == [[1] * 8, [1, 1, 1, 1, 2, 2, 2, 0]]
    found = positions(jnp.asarray(segment_ids))
    assert found[0].tolist() == list(range(8))
    assert found[1, :7].tolist() == [0, 1, 2, 3, 0, 1, 2]


def test_b83_a_stop_token_that_is_also_the_padding_keeps_its_weight() -> None:
    stop = 5
    answer = Document(np.array([1, 2, stop], np.int32), np.array([False, True, True]))
    packed = PackedRows([answer, answer], 8, pad_id=stop)
    row = packed[0]
    assert row.tokens.tolist() == [1, 2, stop, 1, 2, stop, stop, stop]
    assert row.segment_ids.tolist() == [1, 1, 1, 2, 2, 2, 0, 0]
    assert row.weights.tolist() == [0, 1, 1, 0, 1, 1, 0, 0]


@given(LENGTHS, st.integers(1, 9))
def test_rows_are_close_to_the_fewest_possible_within_each_window(lengths: list[int], window: int) -> None:
    rows = pack(lengths, ROW, window=window)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    for row in rows:
        assert sum(lengths[index] for index in row) <= ROW
        assert len({index // window for index in row}) == 1
    for begin in range(0, len(lengths), window):
        of_window = [row for row in rows if row[0] // window == begin // window]
        fewest = -(-sum(lengths[begin : begin + window]) // ROW)
        # Any two rows hold more than one row together, or the later would not have been opened.
        assert len(of_window) <= max(1, 2 * fewest - 1)


def test_best_fit_fills_rows_that_fit_exactly() -> None:
    assert pack([4, 7, 3, 5, 6, 5], 10) == [[1, 2], [4, 0], [3, 5]]


@given(LENGTHS)
def test_in_the_order_of_the_documents_a_row_ends_where_the_next_one_does_not_fit(lengths: list[int]) -> None:
    rows = pack_in_order(lengths, ROW)
    assert [index for row in rows for index in row] == list(range(len(lengths)))
    filled = [sum(lengths[index] for index in row) for row in rows]
    assert max(filled) <= ROW
    for tokens, following in zip(filled, rows[1:], strict=False):
        assert tokens + lengths[following[0]] > ROW


def test_rows_as_written_hold_the_documents_one_after_the_other() -> None:
    packed = PackedRows(documents([4, 5, 3, 2]), 10, pad_id=99, order="as_written")
    assert packed[0].tokens.tolist() == [*range(9), 99]
    assert packed[1].tokens.tolist() == [*range(9, 14), *[99] * 5]
    assert packed.fingerprint() != PackedRows(documents([4, 5, 3, 2]), 10, pad_id=99).fingerprint()


def test_a_token_of_a_document_with_weights_has_its_own() -> None:
    weights = np.array([0, 0.125, 1, 3], np.float32)
    packed = PackedRows([Document(np.arange(4, dtype=np.int32), weights)] * 2, 9)
    assert packed[0].weights.tolist() == [*weights.tolist(), *weights.tolist(), 0]
    assert packed.documents[0].trained.tolist() == [False, True, True, True]


def test_the_same_lengths_give_the_same_rows() -> None:
    lengths = np.random.default_rng(3).integers(1, 100, 500).tolist()
    assert pack(lengths, 128) == pack(list(lengths), 128)
    assert pack(lengths, 128) != pack(lengths[::-1], 128)


def test_padding_is_the_share_of_tokens_of_no_document() -> None:
    packed = PackedRows(documents([5, 4, 3]), 10)
    assert packed.padding == pytest.approx(1 - 12 / 20)
    assert packed.padding == pytest.approx(
        np.mean([(packed[index].segment_ids == 0).mean() for index in range(2)])
    )
    assert PackedRows([], 10).padding == 0


def test_common_lengths_leave_little_padding() -> None:
    lengths = np.minimum(np.random.default_rng(5).lognormal(5, 0.8, 5000).astype(int) + 1, 2048).tolist()
    rows = pack(lengths, 2048)
    assert 1 - sum(lengths) / (2048 * len(rows)) < 0.01


def test_a_document_longer_than_a_row_is_refused() -> None:
    for order in ("shuffled", "as_written"):
        with pytest.raises(DataError, match="document 1 has 24 tokens, expected at most those of a row, 23"):
            PackedRows(documents([4, 24]), ROW, order=order)


def test_rows_are_the_same_only_with_the_same_documents_and_layout() -> None:
    base = PackedRows(documents([4, 5]), 10).fingerprint()
    assert PackedRows(documents([4, 5]), 10).fingerprint() == base
    other = documents([4, 5])
    other[0].weights[2] = True
    for packed in (
        PackedRows(documents([5, 4]), 10),
        PackedRows(documents([4, 5]), 11),
        PackedRows(documents([4, 5]), 10, pad_id=1),
        PackedRows(other, 10),
    ):
        assert packed.fingerprint() != base
