"""Prompts that begin alike: what a model remembers of their beginnings, kept under a budget of bytes.

The memory of this family is a hybrid. Keys and values of a prefix are parts of those of every longer one, so they are
kept by blocks, which prefixes share. The matrices and windows of the DeltaNet layers are of one prefix alone: of some
prefixes a snapshot is kept, and only there can a prompt go on. A prompt that shares more than that is cut back to the
last snapshot; but the place where it left the others is where more prompts may, so a snapshot is taken there next.

Source: the choice of places is that of Pan et al., "Marconi: Prefix caching for the era of hybrid LLMs" (2024), section
4: the end of a sequence, and the points where prompts have been seen to part.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

BLOCK = 64
"""Tokens of a block of keys and values."""

Block = TypeVar("Block")
Snapshot = TypeVar("Snapshot")


@dataclasses.dataclass(frozen=True)
class Hit(Generic[Block, Snapshot]):
    """The longest prefix of a prompt that can be gone on from.

    Attributes:
        length: tokens.
        blocks: their keys and values, in order; the last may be filled in part.
        snapshot: the rest of the memory.
    """

    length: int
    blocks: tuple[Block, ...]
    snapshot: Snapshot


@dataclasses.dataclass(frozen=True)
class PrefixCacheStatistics:
    """Where a prefix cache stands.

    Attributes:
        budget: bytes that it may hold.
        held: bytes that it holds.
        snapshots: prefixes that can be gone on from.
        hits: prompts that went on from one.
        misses: prompts that had to be consumed from their start.
        evicted: snapshots that had to make room.
    """

    budget: int
    held: int
    snapshots: int
    hits: int
    misses: int
    evicted: int


@dataclasses.dataclass
class _KeptBlock(Generic[Block]):
    content: Block
    nbytes: int
    prefixes: int = 0
    """Prefixes that it is a part of; with the last of them it goes."""


@dataclasses.dataclass(frozen=True)
class _Prefix(Generic[Snapshot]):
    length: int
    blocks: tuple[bytes, ...]
    rest: tuple[int, ...]
    """Its tokens after the last full block."""
    snapshot: Snapshot
    nbytes: int


class PrefixCache(Generic[Block, Snapshot]):
    """Bookkeeping on the host. What blocks and snapshots are, and where they lie, is the caller's affair.

    The prefix that was used longest ago makes room first, and with it the blocks that no other prefix needs.

    Args:
        budget: bytes that blocks and snapshots may take together; 0 keeps nothing.
        size: of a block or a snapshot, in bytes.
    """

    def __init__(self, budget: int, size: Callable[[Block | Snapshot], int]):
        self._budget = budget
        self._size = size
        self._blocks: dict[bytes, _KeptBlock[Block]] = {}
        self._prefixes: collections.OrderedDict[bytes, _Prefix[Snapshot]] = collections.OrderedDict()
        self._after: dict[bytes, set[bytes]] = {}
        """For the name of a run of full blocks, the prefixes that end within the block after it."""
        self._held = 0
        self._counts = dict.fromkeys(("hits", "misses", "evicted"), 0)

    @property
    def keeps_anything(self) -> bool:
        return self._budget > 0

    def find(self, tokens: Sequence[int]) -> Hit[Block, Snapshot] | None:
        """The longest kept prefix that leaves at least one token to consume. It counts as used now."""
        found: bytes | None = None
        for full, name in enumerate(_names(tokens, len(tokens) // BLOCK)):
            for key in self._after.get(name, ()):
                prefix = self._prefixes[key]
                rest = tuple(tokens[full * BLOCK : prefix.length])
                longer = found is None or prefix.length > self._prefixes[found].length
                if longer and prefix.length < len(tokens) and rest == prefix.rest:
                    found = key
        self._counts["misses" if found is None else "hits"] += 1
        if found is None:
            return None
        self._prefixes.move_to_end(found)
        prefix = self._prefixes[found]
        return Hit(
            prefix.length, tuple(self._blocks[name].content for name in prefix.blocks), prefix.snapshot
        )

    def parting(self, tokens: Sequence[int]) -> int:
        """How many tokens of a prompt lie in blocks that are kept: at this place it leaves the others."""
        names = itertools.islice(_names(tokens, len(tokens) // BLOCK), 1, None)
        return BLOCK * sum(1 for _ in itertools.takewhile(self._blocks.__contains__, names))

    def holds(self, tokens: Sequence[int]) -> bool:
        """Whether there is a snapshot after exactly these tokens."""
        return _block_names(tokens)[-1] in self._prefixes

    def add(
        self, tokens: Sequence[int], read_block: Callable[[int], Block], read_snapshot: Callable[[], Snapshot]
    ) -> None:
        """Keeps a prefix, and makes room for it.

        Args:
            tokens: of the prefix.
            read_block: gives the keys and values of `BLOCK` tokens from the given one on.
            read_snapshot: gives the rest of the memory after these tokens.
        """
        if not self.keeps_anything:
            return
        names = _block_names(tokens)
        key = names[-1]
        if key in self._prefixes:
            return
        for index, name in enumerate(names):
            if name not in self._blocks:
                content = read_block(index * BLOCK)
                self._blocks[name] = _KeptBlock(content, self._size(content))
                self._held += self._blocks[name].nbytes
            self._blocks[name].prefixes += 1
        snapshot = read_snapshot()
        rest = tuple(tokens[len(tokens) // BLOCK * BLOCK :])
        prefix = _Prefix(len(tokens), tuple(names), rest, snapshot, self._size(snapshot))
        self._prefixes[key] = prefix
        self._after.setdefault(self._run_before(prefix), set()).add(key)
        self._held += prefix.nbytes
        while self._held > self._budget:
            self._evict()

    def statistics(self) -> PrefixCacheStatistics:
        return PrefixCacheStatistics(
            budget=self._budget, held=self._held, snapshots=len(self._prefixes), **self._counts
        )

    def _evict(self) -> None:
        key, prefix = self._prefixes.popitem(last=False)
        before = self._run_before(prefix)
        self._after[before].remove(key)
        if not self._after[before]:
            del self._after[before]
        self._held -= prefix.nbytes
        for name in prefix.blocks:
            block = self._blocks[name]
            block.prefixes -= 1
            if not block.prefixes:
                self._held -= block.nbytes
                del self._blocks[name]
        self._counts["evicted"] += 1

    @staticmethod
    def _run_before(prefix: _Prefix[Snapshot]) -> bytes:
        full = prefix.length // BLOCK
        return prefix.blocks[full - 1] if full else b""


def _names(tokens: Sequence[int], blocks: int) -> Iterator[bytes]:
    """Names of the runs of 0, 1, 2, ... full blocks. A name stands for all tokens up to its end."""
    name = b""
    yield name
    for index in range(blocks):
        name = _digest(name, tokens[index * BLOCK : (index + 1) * BLOCK])
        yield name


def _block_names(tokens: Sequence[int]) -> list[bytes]:
    """Names of a prefix's blocks, the last filled in part or not. Its last one is the prefix's own."""
    full = len(tokens) // BLOCK
    name, *names = _names(tokens, full)
    rest = tokens[full * BLOCK :]
    return [*names, _digest(names[-1] if names else name, rest)] if rest else names


def _digest(name: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.asarray(tokens, np.int64).tobytes(), key=name, digest_size=32).digest()
