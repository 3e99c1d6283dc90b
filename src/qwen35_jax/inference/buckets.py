"""The few shapes that prompts and caches are padded to, so that few programs are compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

PREFILL_BUCKETS = (16, 32, 64, 128, 256, 512)
LEAST_CAPACITY = 512


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A piece of a prompt: tokens `start` to `stop`, padded on the right to `padded_length`."""

    start: int
    stop: int
    padded_length: int


def prefill_chunks(length: int, buckets: tuple[int, ...] = PREFILL_BUCKETS) -> list[Chunk]:
    """Cuts a prompt into pieces, each padded to one of a few lengths.

    The largest bucket is taken as often as it fits, so that a long prompt is a loop over one program. The
    rest is padded to the next bucket, or cut once more where that saves a quarter of the work or more: 300
    tokens run as 256 and 64, not as 512.

    Args:
        length: tokens of the prompt, at least 1.
        buckets: allowed lengths, ascending.
    """
    chunks = []
    start = 0
    while start < length:
        rest = length - start
        padded = next((bucket for bucket in buckets if bucket >= rest), buckets[-1])
        below = max((bucket for bucket in buckets if bucket < min(padded, rest)), default=0)
        if below >= 128 and padded > rest:
            tail = next(bucket for bucket in buckets if bucket >= rest - below)
            if below + tail <= 0.75 * padded:
                padded = below
        stop = min(length, start + padded)
        chunks.append(Chunk(start, stop, padded))
        start = stop
    return chunks


def pieces_between(start: int, stop: int, cuts: Iterable[int], buckets: tuple[int, ...]) -> list[Chunk]:
    """Pieces of the tokens from `start` to `stop` of a prompt, of which one ends at every cut between them."""
    ends = sorted({cut for cut in cuts if start < cut < stop} | {stop})
    pieces = []
    for end in ends:
        for piece in prefill_chunks(end - start, buckets):
            pieces.append(Chunk(start + piece.start, start + piece.stop, piece.padded_length))
        start = end
    return pieces


def cache_capacity(tokens: int, context: int) -> int:
    """Slots of a cache that holds `tokens`: a power of two from 512 up, at most `context`.

    Spare slots cost memory only: attention walks the slots in use.
    """
    capacity = LEAST_CAPACITY
    while capacity < tokens:
        capacity *= 2
    return max(tokens, min(capacity, context))
