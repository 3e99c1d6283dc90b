"""The engine's bookkeeping: first come first served into slots, prompts consumed in turn, nothing lost."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from qwen35_jax.inference.buckets import Chunk
from qwen35_jax.inference.engine.scheduler import Scheduler


@dataclasses.dataclass(eq=False)
class Ticket:
    name: str
    pieces: int = 1
    cancelled: bool = False

    @property
    def chunks(self) -> list[Chunk]:
        return [Chunk(16 * i, 16 * i + 16, 16) for i in range(self.pieces)]


def names(pairs) -> list[tuple[int, str]]:
    return [(slot, ticket.name) for slot, ticket in pairs]


def test_requests_get_slots_in_the_order_in_which_they_came():
    scheduler = Scheduler(slots=2, queue_limit=3)
    tickets = [Ticket(name) for name in "abc"]
    for ticket in tickets:
        scheduler.add(ticket)
    assert not scheduler.full and names(scheduler.admit()) == [(0, "a"), (1, "b")]
    assert not scheduler.full and scheduler.queued == 1
    assert names(scheduler.admit()) == []
    scheduler.free(1, tickets[1])
    assert names(scheduler.admit()) == [(1, "c")]


def test_as_many_may_come_as_there_are_free_slots_and_places_to_wait_whenever_the_slots_are_given_out():
    for admitting in (False, True):
        scheduler, taken = Scheduler(slots=2, queue_limit=3), 0
        while not scheduler.full:
            scheduler.add(Ticket(str(taken)))
            taken += 1
            if admitting:
                list(scheduler.admit())
        assert taken == 5
        list(scheduler.admit())
        assert scheduler.full and scheduler.queued == 3


def test_a_short_prompt_waits_for_one_piece_of_a_long_one_and_not_for_all():
    scheduler = Scheduler(slots=3, queue_limit=3)
    for ticket in (Ticket("long", 5), Ticket("short", 1), Ticket("middle", 2)):
        scheduler.add(ticket)
    list(scheduler.admit())
    order = []
    while (piece := scheduler.next_piece()) is not None:
        order.append((piece[1].name, piece[2].start // 16))
    assert order == [
        ("long", 0), ("short", 0), ("middle", 0), ("long", 1), ("middle", 1), ("long", 2), ("long", 3), ("long", 4),
    ]  # fmt: skip


def test_a_slot_decodes_once_its_prompt_is_consumed():
    scheduler = Scheduler(slots=2, queue_limit=2)
    for ticket in (Ticket("two", 2), Ticket("one", 1)):
        scheduler.add(ticket)
    list(scheduler.admit())
    seen = []
    for _ in range(4):
        seen.append((names(scheduler.decoding()), scheduler.consuming()))
        scheduler.next_piece()
    assert seen == [
        ([], True),
        ([], True),
        ([(1, "one")], True),
        ([(0, "two"), (1, "one")], False),
    ]


def test_a_freed_slot_is_not_freed_again_under_its_next_tenant():
    scheduler = Scheduler(slots=1, queue_limit=2)
    first, second = Ticket("first"), Ticket("second")
    scheduler.add(first)
    scheduler.add(second)
    list(scheduler.admit())
    scheduler.free(0, first)
    list(scheduler.admit())
    scheduler.free(0, first)
    assert names(scheduler.tenants()) == [(0, "second")]


@given(st.lists(st.sampled_from(["add", "admit", "piece", "cancel", "free"]), max_size=60), st.integers(1, 4))
def test_every_request_is_in_one_place_whatever_happens(actions, slots):
    scheduler = Scheduler(slots=slots, queue_limit=5)
    inside: list[Ticket] = []
    for step, action in enumerate(actions):
        if action == "add" and not scheduler.full:
            inside.append(Ticket(f"t{step}", pieces=1 + step % 3))
            scheduler.add(inside[-1])
        elif action == "admit":
            list(scheduler.admit())
        elif action == "piece":
            scheduler.next_piece()
        elif action == "cancel" and inside:
            inside[step % len(inside)].cancelled = True
            for ticket in scheduler.drop_cancelled():
                inside.remove(ticket)
        elif action == "free" and scheduler.decoding():
            slot, ticket = scheduler.decoding()[0]
            scheduler.free(slot, ticket)
            inside.remove(ticket)
        assert sorted(t.name for t in scheduler.everyone()) == sorted(t.name for t in inside)
        assert scheduler.occupied + scheduler.queued == len(inside)
        assert scheduler.occupied <= slots
    assert scheduler.idle == (not inside)
