"""An engine: requests come at any moment, share the slots of one batch, and each gets its stream of tokens."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import UInt32

from qwen35_jax.errors import PromptError, QueueFullError, Qwen35Error
from qwen35_jax.inference.answer import Answer
from qwen35_jax.inference.buckets import PREFILL_BUCKETS, Chunk, pieces_between
from qwen35_jax.inference.engine.memory import MemoryPlan, plan_memory, prefix_cache_budget
from qwen35_jax.inference.engine.prefix_cache import BLOCK, PrefixCache
from qwen35_jax.inference.engine.request import AnswerStream, Request
from qwen35_jax.inference.engine.scheduler import Scheduler
from qwen35_jax.inference.engine.slot_runner import Place, SlotRunner, compiled_programs, tree_bytes
from qwen35_jax.inference.engine.snapshots import Block, Snapshot
from qwen35_jax.inference.engine.statistics import COUNTED, EngineStatistics
from qwen35_jax.inference.engine.ticket import Ticket, ticket_for
from qwen35_jax.inference.placement import Placement
from qwen35_jax.inference.programs import PASSES_IN_A_BLOCK
from qwen35_jax.inference.rows import Emission, drawable_vocabulary, part_of
from qwen35_jax.inference.runnable import RunnableModel
from qwen35_jax.inference.settings import GenerationSettings
from qwen35_jax.inference.speculation import Speculation, require_head
from qwen35_jax.inference.tokenizer import Tokenizer

PASSES_BESIDE_PREFILL = 1
"""While prompts are being consumed, the slots that decode get one pass after every piece."""


@dataclasses.dataclass(frozen=True)
class _Work:
    """Something that the device is still computing, and what to do with it."""

    outputs: Any
    deliver: Callable[[Any], None]


class Engine:
    """Runs requests in the slots of one batch. Every answer is the one that its request alone would get.

    (In bfloat16 up to rounding, where a prompt goes on from a remembered prefix: it was consumed in other pieces.)

    A thread of its own drives the device. Each of its rounds consumes one piece of one prompt, slots taking turns, and
    then decodes in all slots that have got that far, so that a long prompt never holds up the others. Programs are
    compiled before the constructor returns, and none after, unless `warm_up` says otherwise.

    Args:
        model: from `qwen35_jax.checkpoint.load`.
        tokenizer: of the model; needed for text, and for stop strings.
        slots: requests that run at the same time.
        context: tokens that each slot has room for, prompt and answer together; by default as many as the device's
            memory and the model's own context allow, up to 32,768.
        prefill_tokens: tokens of a prompt that are consumed in one piece, one of `PREFILL_BUCKETS`.
        queue_limit: requests that may wait; one more is refused.
        speculation: see `generate`.
        prefix_cache_bytes: how much may be remembered of prompts and answers, so that later prompts that begin alike
            go on from there; 0 remembers nothing. By default a tenth of the free memory of the place.
        prefix_cache_place: the memory of the host, or that of the device.
        warm_up: false has programs compiled when a request first needs them: a sooner start, for a single client who
            rather waits now and then.

    Attributes:
        memory: what the slots take.
        compile_seconds: spent on compiling while nothing else ran.
        compiling: whether that goes on just now.

    Raises:
        PromptError: a number is out of range, or speculation is asked of a model without the head.
        CapacityError: the slots do not fit into the device's memory.
    """

    def __init__(
        self,
        model: RunnableModel,
        tokenizer: Tokenizer | None = None,
        *,
        slots: int = 8,
        context: int | None = None,
        prefill_tokens: int = 256,
        queue_limit: int = 64,
        speculation: Speculation | None = None,
        prefix_cache_bytes: int | None = None,
        prefix_cache_place: Place = "host",
        warm_up: bool = True,
    ):
        for name, value in (("slots", slots), ("queue_limit", queue_limit)):
            if value < 1:
                raise PromptError(f"{name} is {value}, expected at least 1")
        if prefix_cache_bytes is not None and prefix_cache_bytes < 0:
            raise PromptError(f"prefix_cache_bytes is {prefix_cache_bytes}, expected at least 0")
        if prefix_cache_place not in ("host", "device"):
            raise PromptError(f"prefix_cache_place is {prefix_cache_place!r}, expected 'host' or 'device'")
        if prefill_tokens not in PREFILL_BUCKETS:
            raise PromptError(f"prefill_tokens is {prefill_tokens}, expected one of {PREFILL_BUCKETS}")
        if speculation is not None:
            require_head(model.parameters)
        self._vocab_size = model.config.text.vocab_size
        self._tokenizer = tokenizer
        # Every other length: half as many programs, for a little more padding.
        self._buckets = PREFILL_BUCKETS[PREFILL_BUCKETS.index(prefill_tokens) :: -2][::-1]
        placement = Placement.beside(model.parameters)
        self.memory: MemoryPlan = plan_memory(
            model, slots=slots, context=context, speculation=speculation, placement=placement
        )
        if prefix_cache_bytes is None:
            prefix_cache_bytes = prefix_cache_budget(prefix_cache_place, placement)
        self._prefixes: PrefixCache[Block, Snapshot] = PrefixCache(prefix_cache_bytes, tree_bytes)
        self._runner = SlotRunner(
            model,
            placement,
            slots=slots,
            context=self.memory.context,
            drawable=drawable_vocabulary(self._vocab_size, tokenizer),
            speculation=speculation,
            keep_prefixes=prefix_cache_place,
        )
        self._scheduler: Scheduler[Ticket] = Scheduler(slots, queue_limit)
        self._changed = threading.Condition()
        self._closing = False
        self._broken: BaseException | None = None
        self._counts: dict[str, int] = dict.fromkeys(COUNTED, 0)
        self._warm: set[int] = set()
        self.compile_seconds, self.compiling = 0.0, False
        if warm_up:
            self._warm_up(self._buckets)
        self._thread = threading.Thread(target=self._run, name="qwen35-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, *, notify: Callable[[], None] = lambda: None) -> AnswerStream:
        """Takes on a request, to be run as soon as a slot is free.

        Args:
            request: what to continue, and how.
            notify: called from the engine's thread whenever the stream has something new. It must not block.

        Raises:
            PromptError: the prompt or a setting cannot be run, or does not fit into a slot.
            QueueFullError: too many requests wait already.
            RuntimeError: the engine is closed, or broke.
        """
        ticket = ticket_for(
            request,
            vocab_size=self._vocab_size,
            context=self.memory.context,
            tokenizer=self._tokenizer,
            wake=self._wake,
            notify=notify,
        )
        with self._changed:
            if self._broken is not None:
                raise RuntimeError("the engine broke and takes no more requests") from self._broken
            if self._closing:
                raise RuntimeError("the engine is closed and takes no more requests")
            if self._scheduler.full:
                raise QueueFullError(
                    f"{self._scheduler.queued} requests are waiting already, and no more may: try again later"
                )
            ticket.number(self._counts["submitted"])
            self._counts["submitted"] += 1
            self._scheduler.add(ticket)
            self._changed.notify_all()
        return ticket.stream

    @property
    def healthy(self) -> bool:
        """Whether requests are still taken on: false once the engine is closed, or broke."""
        with self._changed:
            return not self._closing and self._broken is None

    def statistics(self) -> EngineStatistics:
        with self._changed:
            return EngineStatistics(
                slots=self.memory.slots,
                occupied=self._scheduler.occupied,
                queued=self._scheduler.queued,
                compiled_programs=compiled_programs(),
                prefix_cache=self._prefixes.statistics(),
                **self._counts,
            )

    def close(self, *, finish: bool = True) -> None:
        """Takes no more requests, and waits until those on their way are answered, or cancels them.

        Args:
            finish: answer them; otherwise they end with what they have.
        """
        with self._changed:
            self._closing = True
            if not finish:
                for ticket in self._scheduler.everyone():
                    ticket.stream.cancel()
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(finish=kind is None)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        """The engine's thread."""
        under_way: list[_Work] = []
        try:
            while True:
                if not under_way:
                    with self._changed:
                        self._changed.wait_for(lambda: self._closing or not self._scheduler.idle)
                        if self._scheduler.idle:
                            return
                if self._grammars_wait():
                    self._receive(under_way)
                    under_way = []
                # The device gets its next work before the host looks at what came of the last.
                started = self._round()
                self._receive(under_way)
                under_way = started
        except BaseException as error:
            self._break(error)

    def _grammars_wait(self) -> bool:
        """Whether a grammar has to hear of the last token before it can tell the next."""
        with self._changed:
            return any(ticket.request.constraint is not None for _, ticket in self._scheduler.decoding())

    def _round(self) -> list[_Work]:
        """Hands the device one round of work."""
        with self._changed:
            for ticket in self._scheduler.drop_cancelled():
                self._finish(ticket, "cancelled")
            admitted = list(self._scheduler.admit())
        for slot, ticket in admitted:
            self._admit(slot, ticket)
        with self._changed:
            piece = self._scheduler.next_piece()
            decoding = self._scheduler.decoding()
            consuming = self._scheduler.consuming()
        started = []
        if piece is not None:
            started += self._consume(*piece)
        if decoding:
            started += self._decode(decoding, beside_prefill=consuming)
        return started

    def _admit(self, slot: int, ticket: Ticket) -> None:
        """Lets a request into a slot, and finds out how much of its prompt has to be consumed."""
        prompt = ticket.request.prompt
        hit, start, cuts = None, 0, set()
        if self._prefixes.keeps_anything:
            hit = self._prefixes.find(prompt)
            start = 0 if hit is None else hit.length
            # Pieces end where a snapshot is worth most.
            cuts = {self._prefixes.parting(prompt), len(prompt) // BLOCK * BLOCK}
        ticket.chunks = pieces_between(start, len(prompt), cuts, self._buckets)
        if self._scheduler.occupied == 1:
            self._warm_up(chunk.padded_length for chunk in ticket.chunks)
        self._runner.occupy(slot, ticket.request, ticket.answer.seed)
        if hit is not None:
            self._runner.restore(slot, hit)
            ticket.answer.cached_tokens = start
            self._count(cached_tokens=start)

    def _warm_up(self, lengths: Iterable[int]) -> None:
        """Compiles what pieces of these padded lengths need, unless that is done. It runs in slots that are free."""
        missing = sorted({*lengths} - self._warm)
        if not missing:
            return
        start, self.compiling = time.perf_counter(), True
        self._runner.warm_up(Request((0,), GenerationSettings(max_new_tokens=1)), missing)
        self._warm.update(missing)
        self.compiling = False
        self.compile_seconds += time.perf_counter() - start

    def _consume(self, slot: int, ticket: Ticket, chunk: Chunk) -> list[_Work]:
        """Consumes a piece of a prompt, and after the last one draws the first token."""
        prompt = ticket.request.prompt
        consumed = self._runner.consume(slot, prompt[chunk.start : chunk.stop], chunk.padded_length)
        self._count(prompt_tokens=chunk.stop - chunk.start)
        if chunk.stop % BLOCK == 0:
            self._runner.remember(self._prefixes, slot, prompt[: chunk.stop])
        if chunk != ticket.chunks[-1]:
            # Waited for like a draw: pieces handed over all at once would hold up whoever comes next.
            return [_Work(consumed, lambda _: None)]
        allowed = self._allowed([(slot, ticket)])
        if ticket.stream.finished:
            return [_Work(consumed, lambda _: None)]
        emission = self._runner.start(slot, allowed.get(slot))
        return [
            _Work(
                emission,
                lambda drawn: self._take(slot, ticket, lambda answer: answer.take(part_of(drawn, 0))),
            )
        ]

    def _decode(self, tenants: list[tuple[int, Ticket]], *, beside_prefill: bool) -> list[_Work]:
        """A block of decoding for these slots."""
        waiting = [ticket for _, ticket in tenants if ticket.request.constraint and not ticket.answer.tokens]
        if any(not ticket.stream.finished for ticket in waiting):
            # Its grammar has not seen the first token yet and cannot tell the second. A round without it would end its
            # row, so everyone waits for the next one.
            return []
        allowed = self._allowed(tenants)
        tenants = [(slot, ticket) for slot, ticket in tenants if not ticket.stream.finished]
        if not tenants:
            return []
        emissions, rows = self._runner.decode(
            {slot: ticket.answer.reason is None for slot, ticket in tenants},
            allowed,
            passes=PASSES_BESIDE_PREFILL if beside_prefill or allowed else PASSES_IN_A_BLOCK,
        )

        def deliver(drawn: Emission) -> None:
            for slot, ticket in tenants:
                passes = [part_of(drawn, each, slice(None), rows[slot]) for each in range(len(drawn.token))]
                self._take(slot, ticket, lambda answer, passes=passes: [*map(answer.take_pass, passes)])

        return [_Work(emissions, deliver)]

    def _allowed(self, tenants: list[tuple[int, Ticket]]) -> dict[int, UInt32[np.ndarray, "words"]]:
        """What the grammars of these slots leave to be drawn next. A request whose grammar breaks ends here."""
        allowed = {}
        for slot, ticket in tenants:
            if ticket.request.constraint is not None and not ticket.stream.finished:
                try:
                    allowed[slot] = ticket.request.constraint.allowed()
                except Qwen35Error as error:
                    self._fail(slot, ticket, error)
        return allowed

    def _receive(self, under_way: list[_Work]) -> None:
        for work in under_way:
            work.deliver(jax.device_get(work.outputs))

    def _take(self, slot: int, ticket: Ticket, take: Callable[[Answer], Any]) -> None:
        """Lets an answer take what was drawn for it, and frees its slot if that has ended it."""
        answer, constraint = ticket.answer, ticket.request.constraint
        if ticket.stream.finished:
            return
        before = len(answer.tokens)
        try:
            take(answer)
            if constraint is not None:
                for token in answer.tokens[before:]:
                    constraint.accept(token)
        except Qwen35Error as error:  # a model that gives NaN, a grammar that grows too large
            self._fail(slot, ticket, error)
        self._count(generated_tokens=len(answer.tokens) - before)
        if answer.reason is None or ticket.stream.finished:
            return
        if not answer.text.stopped:
            # The row ended on the device, which has consumed all but the last token. (At a stop string it went on.)
            self._runner.remember(self._prefixes, slot, answer.prompt + tuple(answer.tokens[:-1]))
        self._free(slot, ticket)
        self._finish(ticket, "finished")

    def _free(self, slot: int, ticket: Ticket) -> None:
        with self._changed:
            self._scheduler.free(slot, ticket)

    def _finish(self, ticket: Ticket, how: Literal["finished", "cancelled"]) -> None:
        if ticket.answer.reason is None:
            ticket.answer.end("cancelled")
        self._count(**{how: 1})
        ticket.stream.finish(ticket.answer.generation())

    def _fail(self, slot: int, ticket: Ticket, error: BaseException) -> None:
        """Ends one request by an error."""
        self._free(slot, ticket)
        self._count(failed=1)
        ticket.stream.finish(error)

    def _break(self, error: BaseException) -> None:
        """The device or this code failed: nothing in the slots can be trusted any more."""
        with self._changed:
            self._broken = error
            tickets = self._scheduler.everyone()
            self._scheduler.clear()
        for ticket in tickets:
            broke = RuntimeError(f"the engine broke while this request was on its way: {error}")
            broke.__cause__ = error
            self._count(failed=1)
            ticket.stream.finish(broke)

    def _count(self, **more: int) -> None:
        with self._changed:
            for name, value in more.items():
                self._counts[name] += value
