"""Rows of pairs: both documents side by side, with what the reference says of them, the same after a restart."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen35_jax.checkpoint.model_name import find_model
from qwen35_jax.errors import CheckpointError
from qwen35_jax.training.batches import Batches, single_pass
from qwen35_jax.training.document import Document
from qwen35_jax.training.packing import NO_ROW
from qwen35_jax.training.preference.dataset import Pair
from qwen35_jax.training.preference.reference import load_reference, save_reference
from qwen35_jax.training.preference.rows import ReferencedRows, pack_pairs, packed_pairs

LENGTHS = ((5, 7), (2, 3), (11, 4), (3, 3), (2, 2))
ROW = 20


def pairs() -> list[Pair]:
    """Documents of which every token is the number of the document, the first untrained."""
    numbers = itertools.count(1)
    return [
        Pair(*(Document(np.full(n, next(numbers), np.int32), np.arange(n) > 0) for n in lengths))
        for lengths in LENGTHS
    ]


def rows(number: float = 0.5) -> ReferencedRows:
    """The reference says of document 1 that number, of document 2 the next and so on."""
    return ReferencedRows(pack_pairs(pairs(), ROW, 99), np.arange(10, dtype=np.float32) + number)


def test_the_documents_of_a_pair_are_neighbours_in_a_row_and_have_their_references() -> None:
    seen = []
    for batch in single_pass(rows(), micro_batches=1, rows=1):
        tokens, segment_ids, weights, reference = (field[0, 0] for field in batch)
        count = segment_ids.max()
        assert count % 2 == 0
        documents = [int(tokens[segment_ids == one][0]) for one in range(1, count + 1)]
        assert all(
            first % 2 == 1 and second == first + 1
            for first, second in zip(documents[::2], documents[1::2], strict=True)
        )
        np.testing.assert_array_equal(reference[:count], np.array(documents) - 0.5)
        assert not reference[count:].any()
        assert weights.sum() == (segment_ids > 0).sum() - count
        seen += documents
    assert sorted(seen) == list(range(1, 11))


def test_a_row_of_padding_has_no_reference() -> None:
    batch = rows().batch(np.array([[0, NO_ROW]]))
    assert not batch.segment_ids[0, 1].any()
    assert not batch.reference[0, 1].any()
    assert batch.reference.shape == (1, 2, rows().packed.most_documents)


def test_steps_that_are_gone_on_with_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    save_reference(tmp_path / "reference.npz", rows().packed, rows().reference)
    stream = Batches(rows(), micro_batches=2, rows=1, seed=3)
    next(stream)
    state = json.loads(json.dumps(stream.get_state()))
    expected = list(itertools.islice(stream, 3))
    packed = pack_pairs(pairs(), ROW, 99)
    other = Batches(
        ReferencedRows(packed, load_reference(tmp_path / "reference.npz", packed)),
        micro_batches=2,
        rows=1,
        seed=3,
    )
    other.set_state(state)
    for one, two in zip(expected, itertools.islice(other, 3), strict=True):
        for left, right in zip(one, two, strict=True):
            np.testing.assert_array_equal(left, right)
            assert left.dtype == right.dtype


def test_references_that_are_not_those_of_the_run_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "reference.npz"
    with pytest.raises(CheckpointError, match=r"reference.npz: cannot be read .*start a new run"):
        load_reference(path, rows().packed)
    save_reference(path, rows().packed, rows().reference)
    with pytest.raises(CheckpointError, match="is of other data"):
        load_reference(path, pack_pairs(pairs()[1:], ROW, 99))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_reference(path, rows().packed)
    with pytest.raises(CheckpointError, match=r"absent/reference.npz: cannot be written: No such file"):
        save_reference(tmp_path / "absent" / "reference.npz", rows().packed, rows().reference)


def test_a_file_of_chats_and_texts_becomes_rows(tmp_path: Path) -> None:
    lines: list[Any] = [
        {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"},
        {"prompt": "2 + 2?", "chosen": [{"role": "assistant", "content": "4"}], "rejected": "5"},
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    packed, summary = packed_pairs(str(path), find_model("nano"), row_length=64, pad_id=0)
    assert (summary.records, summary.pairs, len(packed.documents)) == (2, 2, 4)
    assert sorted(itertools.chain.from_iterable(packed.rows)) == [0, 1, 2, 3]
