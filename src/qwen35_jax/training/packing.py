"""Documents side by side in rows of one length, so that little of a batch is padding.

Documents that belong together, as the two answers of a preference, share a row and stand next to each other in it.

Documents are taken in windows, and those of a window placed from the longest to the shortest, each into the row that
it leaves the least room in, a new one if it fits into none (best-fit decreasing, whose rows are at most 11/9 of the
fewest possible, and one more; D. S. Johnson, "Near-optimal bin packing algorithms", 1973). No document is split. The
same lengths give the same rows on every machine.

For data whose order means something, as that of a curriculum does, there are rows in the order of the documents
instead: each goes into the row of the one before it, or begins the next.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from qwen35_jax.training.document import Document
from qwen35_jax.training.objective import Batch
from qwen35_jax.training.records import DataError

NO_ROW = -1
"""Index of a row of padding."""

WINDOW = 4096
"""Documents that are placed together; the search takes time that grows with it."""


Order = Literal["shuffled", "as_written"]
"""Of rows and of the documents in them: any, chosen so that little is padding, or that in which they are given."""


class Row(NamedTuple):
    """Documents side by side.

    Attributes:
        tokens: ids; at padding that of `PackedRows.pad_id`.
        segment_ids: 1, 2, 3 for the documents and 0 for the padding behind them, whatever the ids of the tokens.
        weights: of the documents; 0 at the padding and at the first token of a document.
    """

    tokens: Int[np.ndarray, " time"]
    segment_ids: Int[np.ndarray, " time"]
    weights: Float[np.ndarray, " time"]


def pack(lengths: Sequence[int], row_length: int, *, window: int = WINDOW) -> list[list[int]]:
    """Which documents share a row.

    Args:
        lengths: tokens of each document.
        row_length: tokens of a row.
        window: documents that are placed together.

    Returns:
        Indices of the documents of each row, every one once.

    Raises:
        DataError: a document is longer than a row.
    """
    _check_fit(lengths, row_length)
    rows: list[list[int]] = []
    for begin in range(0, len(lengths), window):
        indices = range(begin, min(begin + window, len(lengths)))
        open_rows: list[tuple[int, int]] = []  # room and row, by room
        for index in sorted(indices, key=lambda index: -lengths[index]):
            place = bisect.bisect_left(open_rows, (lengths[index], -1))
            if place == len(open_rows):
                room, row = row_length, len(rows)
                rows.append([])
            else:
                room, row = open_rows.pop(place)
            rows[row].append(index)
            bisect.insort(open_rows, (room - lengths[index], row))
    return rows


def pack_in_order(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """The same, with rows that follow each other as the documents do, as many in each as fit."""
    _check_fit(lengths, row_length)
    rows: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if not rows or length > room:
            rows.append([])
            room = row_length
        rows[-1].append(index)
        room -= length
    return rows


def _check_fit(lengths: Sequence[int], row_length: int) -> None:
    for index, length in enumerate(lengths):
        if length > row_length:
            raise DataError(
                f"document {index} has {length} tokens, expected at most those of a row, {row_length}: "
                "drop or cut it before packing"
            )


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """The rows of a data set, each made when it is asked for.

    Attributes:
        documents: none of them empty or longer than a row.
        row_length: tokens of a row.
        pad_id: token that fills rows up. It may be a token of the text as well: what is padding is told by
            `segment_ids` alone, never by an id.
        together: so many documents at a time, one after the other, share a row.
        order: of the rows.
        rows: indices of the documents of each row, in the order in which they stand there.
    """

    documents: Sequence[Document]
    row_length: int
    pad_id: int = 0
    together: int = 1
    order: Order = "shuffled"
    rows: Sequence[Sequence[int]] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        lengths = np.array([len(document.tokens) for document in self.documents], np.int64)
        packed = {"shuffled": pack, "as_written": pack_in_order}[self.order]
        rows = packed(lengths.reshape(-1, self.together).sum(axis=1).tolist(), self.row_length)
        object.__setattr__(self, "rows", [[one for each in row for one in self._group(each)] for row in rows])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self._row([self.documents[each] for each in self.rows[index]])

    def batch(self, indices: Int[np.ndarray, "micro_batches rows"]) -> Batch:
        """Rows by their indices, where `NO_ROW` stands for one of padding. Arrays are of NumPy."""
        made = [self._row([]) if index == NO_ROW else self[index] for index in indices.flat]
        # Any, since the fields are declared for the device's arrays, which these become where they are put on one.
        fields: list[Any] = [np.stack(field).reshape(*indices.shape, -1) for field in zip(*made, strict=True)]
        return Batch(*fields)

    @property
    def padding(self) -> float:
        """Share of the tokens of all rows that are padding."""
        tokens = sum(len(document.tokens) for document in self.documents)
        return 1 - tokens / (len(self) * self.row_length) if len(self) else 0.0

    @functools.cached_property
    def most_documents(self) -> int:
        """Documents in the row that has the most of them."""
        return max(map(len, self.rows), default=0)

    def fingerprint(self) -> str:
        """A text that is the same only for the same rows."""
        digest = hashlib.sha256(f"{self.row_length} {self.pad_id} {self.rows}".encode())
        for document in self.documents:
            digest.update(document.tokens.tobytes() + document.weights.tobytes())
        return digest.hexdigest()[:16]

    def _group(self, index: int) -> range:
        return range(index * self.together, (index + 1) * self.together)

    def _row(self, documents: Sequence[Document]) -> Row:
        row = Row(
            np.full(self.row_length, self.pad_id, np.int32),
            np.zeros(self.row_length, np.int32),
            np.zeros(self.row_length, np.float32),
        )
        ends = itertools.accumulate(len(document.tokens) for document in documents)
        for number, (document, end) in enumerate(zip(documents, ends, strict=True), 1):
            here = slice(end - len(document.tokens), end)
            row.tokens[here] = document.tokens
            row.segment_ids[here] = number
            row.weights[here] = document.weights
        return row
