"""Who gets which slot, and what runs next: plain bookkeeping on the host, which knows of no device."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from qwen35_jax.inference.buckets import Chunk


class Waiting(Protocol):
    """What the scheduler asks of a request."""

    @property
    def chunks(self) -> Sequence[Chunk]:
        """The pieces of its prompt, in order."""
        ...

    @property
    def cancelled(self) -> bool: ...


Ticket = TypeVar("Ticket", bound=Waiting)


@dataclasses.dataclass
class _Slot(Generic[Ticket]):
    ticket: Ticket | None = None
    consumed: int = 0
    """Pieces of the prompt that have been consumed."""


class Scheduler(Generic[Ticket]):
    """First come, first served into the slots; there, prompts are consumed in turn, one piece each.

    So a short prompt waits for one piece of each long one beside it at most, and never for all of their pieces.
    """

    def __init__(self, slots: int, queue_limit: int):
        self._slots: list[_Slot[Ticket]] = [_Slot() for _ in range(slots)]
        self._queue: collections.deque[Ticket] = collections.deque()
        self._queue_limit = queue_limit
        self._turn = 0

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def occupied(self) -> int:
        return sum(slot.ticket is not None for slot in self._slots)

    @property
    def idle(self) -> bool:
        return not self._queue and not self.occupied

    @property
    def full(self) -> bool:
        """Whether no more may wait. Requests for which a slot is free do not count: they are about to get it."""
        free = len(self._slots) - self.occupied
        return len(self._queue) >= self._queue_limit + free

    def add(self, ticket: Ticket) -> None:
        """Puts a request at the end of the queue; only while it is not `full`."""
        assert not self.full
        self._queue.append(ticket)

    def drop_cancelled(self) -> list[Ticket]:
        """Takes cancelled requests out of the queue and out of their slots."""
        dropped = [ticket for ticket in self._queue if ticket.cancelled]
        self._queue = collections.deque(ticket for ticket in self._queue if not ticket.cancelled)
        for index, ticket in self.tenants():
            if ticket.cancelled:
                self.free(index, ticket)
                dropped.append(ticket)
        return dropped

    def admit(self) -> Iterator[tuple[int, Ticket]]:
        """Gives free slots to the requests that have waited longest."""
        for index, slot in enumerate(self._slots):
            if slot.ticket is None and self._queue:
                slot.ticket, slot.consumed = self._queue.popleft(), 0
                yield index, slot.ticket

    def tenants(self) -> list[tuple[int, Ticket]]:
        """Every occupied slot with its request."""
        return [(index, slot.ticket) for index, slot in enumerate(self._slots) if slot.ticket is not None]

    def next_piece(self) -> tuple[int, Ticket, Chunk] | None:
        """The piece of a prompt to consume now, slots taking turns; None where all prompts are consumed."""
        for step in range(len(self._slots)):
            index = (self._turn + step) % len(self._slots)
            slot = self._slots[index]
            if slot.ticket is not None and slot.consumed < len(slot.ticket.chunks):
                chunk = slot.ticket.chunks[slot.consumed]
                slot.consumed += 1
                self._turn = index + 1
                return index, slot.ticket, chunk
        return None

    def decoding(self) -> list[tuple[int, Ticket]]:
        """Slots whose prompt is consumed, with their requests."""
        return [
            (index, ticket)
            for index, ticket in self.tenants()
            if self._slots[index].consumed == len(ticket.chunks)
        ]

    def consuming(self) -> bool:
        """Whether some prompt is not consumed yet."""
        return len(self.decoding()) < self.occupied

    def free(self, index: int, ticket: Ticket) -> None:
        """Takes a request out of its slot; nothing happens if it is not there any more."""
        if self._slots[index].ticket is ticket:
            self._slots[index] = _Slot()

    def everyone(self) -> list[Ticket]:
        """All requests, in slots and in the queue."""
        return [ticket for _, ticket in self.tenants()] + list(self._queue)

    def clear(self) -> None:
        """Takes all requests out."""
        self._queue.clear()
        self._slots = [_Slot() for _ in self._slots]
