"""An engine: requests come at any moment, share the slots of one batch, and each gets its stream of tokens."""

from __future__ import annotations

import dataclasses
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from qwen35_jax.errors import NonFiniteError, PromptError, QueueFullError
from qwen35_jax.inference.answer import Answer
from qwen35_jax.inference.buckets import PREFILL_BUCKETS, Chunk, prefill_chunks
from qwen35_jax.inference.engine.memory import MemoryPlan, plan_memory
from qwen35_jax.inference.engine.request import AnswerStream, Request
from qwen35_jax.inference.engine.scheduler import Scheduler
from qwen35_jax.inference.engine.slots import (
    Slots,
    Tenant,
    decode_slots,
    empty_slots,
    occupy,
    prefill_slot,
    start_slot,
)
from qwen35_jax.inference.placement import Placement
from qwen35_jax.inference.prompts import check_prompt
from qwen35_jax.inference.rows import (
    STOP_ID_SLOTS,
    Allowed,
    Emission,
    drawable_vocabulary,
    fresh_rows,
    limits_of,
    part_of,
)
from qwen35_jax.inference.runnable import RunnableModel
from qwen35_jax.inference.sampling import stack_settings
from qwen35_jax.inference.settings import GenerationSettings
from qwen35_jax.inference.speculation import Speculation, require_head
from qwen35_jax.inference.tokenizer import Tokenizer

COUNTED = (
    "submitted",
    "finished",
    "cancelled",
    "failed",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
)
PASSES_IN_A_BLOCK = 8
PASSES_BESIDE_PREFILL = 1
"""While prompts are being consumed, the slots that decode get one pass after every piece."""


@dataclasses.dataclass(frozen=True)
class EngineStatistics:
    """Where an engine stands.

    Attributes:
        slots: of the batch.
        occupied: slots with a request in them.
        queued: requests that wait for a slot.
        submitted: requests taken on since the start.
        finished: of these, answered to their end.
        cancelled: of these, ended by their clients.
        failed: of these, ended by an error.
        prompt_tokens: consumed.
        cached_tokens: of prompts, those that were remembered and did not have to be consumed.
        generated_tokens: drawn.
        compiled_programs: how many the engine has compiled; it stays as it is after the warm-up.
    """

    slots: int
    occupied: int
    queued: int
    submitted: int
    finished: int
    cancelled: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    compiled_programs: int


@dataclasses.dataclass
class _Ticket:
    """A request on its way through the engine."""

    request: Request
    stream: AnswerStream
    answer: Answer
    chunks: Sequence[Chunk]

    @property
    def cancelled(self) -> bool:
        return self.stream.cancelled


@dataclasses.dataclass(frozen=True)
class _Drawn:
    """Emissions that the device is still computing, and who was in the slots when it began."""

    emissions: Emission
    tenants: list[tuple[int, _Ticket]]
    is_block: bool


class Engine:
    """Runs requests in the slots of one batch. Every answer is the one that its request alone would get.

    A thread of its own drives the device. Each of its rounds consumes one piece of one prompt, slots taking turns, and
    then decodes in all slots that have got that far, so that a long prompt never holds up the others. Programs are
    compiled before the constructor returns, and none after.

    Args:
        model: from `qwen35_jax.checkpoint.load`.
        tokenizer: of the model; needed for text, and for stop strings.
        slots: requests that run at the same time.
        context: tokens that each slot has room for, prompt and answer together; by default up to 8,192, as the
            device's memory and the model's own context allow.
        prefill_tokens: tokens of a prompt that are consumed in one piece, one of `PREFILL_BUCKETS`.
        queue_limit: requests that may wait; one more is refused.
        speculation: see `generate`.

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
    ):
        for name, value in (("slots", slots), ("queue_limit", queue_limit)):
            if value < 1:
                raise PromptError(f"{name} is {value}, expected at least 1")
        if prefill_tokens not in PREFILL_BUCKETS:
            raise PromptError(f"prefill_tokens is {prefill_tokens}, expected one of {PREFILL_BUCKETS}")
        if speculation is not None:
            require_head(model.parameters)
        self._model = model
        self._tokenizer = tokenizer
        self._buckets = tuple(bucket for bucket in PREFILL_BUCKETS if bucket <= prefill_tokens)
        self._placement = Placement.beside(model.parameters)
        self._static = model.graphdef, self._placement, model.parameters
        self.memory: MemoryPlan = plan_memory(
            model, slots=slots, context=context, speculation=speculation, placement=self._placement
        )
        self._drawable = drawable_vocabulary(model.config.text.vocab_size, tokenizer)
        self._slots: Slots = empty_slots(
            model,
            self._placement,
            slots=slots,
            capacity=self.memory.context,
            drawable=self._drawable,
            speculation=speculation,
        )
        self._scheduler: Scheduler[_Ticket] = Scheduler(slots, queue_limit)
        self._changed = threading.Condition()
        self._closing = False
        self._broken: BaseException | None = None
        self._counts: dict[str, int] = dict.fromkeys(COUNTED, 0)
        self._warm_up()
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
        ticket = self._ticket(request, notify)
        with self._changed:
            if self._broken is not None:
                raise RuntimeError("the engine broke and takes no more requests") from self._broken
            if self._closing:
                raise RuntimeError("the engine is closed and takes no more requests")
            if self._scheduler.full:
                raise QueueFullError(
                    f"{self._scheduler.queued} requests are waiting already, and no more may: try again later"
                )
            ticket.stream.number = ticket.answer.row = self._counts["submitted"]
            self._counts["submitted"] += 1
            self._scheduler.add(ticket)
            self._changed.notify_all()
        return ticket.stream

    def statistics(self) -> EngineStatistics:
        with self._changed:
            return EngineStatistics(
                slots=self.memory.slots,
                occupied=self._scheduler.occupied,
                queued=self._scheduler.queued,
                compiled_programs=compiled_programs(),
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

    def _ticket(self, request: Request, notify: Callable[[], None] = lambda: None) -> _Ticket:
        prompt, settings = check_prompt(
            "the prompt",
            request.prompt,
            request.settings,
            vocab_size=self._model.config.text.vocab_size,
            context=self.memory.context,
            whose="this engine's context",
            tokenizer=self._tokenizer,
        )
        assert settings.max_new_tokens is not None
        if settings.stop and self._tokenizer is None:
            raise PromptError("stop strings need a tokenizer, and this engine was made without one")
        if len(request.stop_ids) > STOP_ID_SLOTS:
            raise PromptError(f"{len(request.stop_ids)} stop ids, expected at most {STOP_ID_SLOTS}")
        stream = AnswerStream(-1, self._wake, notify)
        seed = secrets.randbits(32) if settings.seed is None else settings.seed
        stop_ids = () if settings.ignore_eos else request.stop_ids
        answer = Answer(
            prompt,
            settings,
            seed=seed,
            tokenizer=self._tokenizer,
            stop_ids=stop_ids,
            listener=stream.put,
            row=-1,
        )
        request = Request(tuple(prompt), settings, stop_ids)
        return _Ticket(request, stream, answer, prefill_chunks(len(prompt), self._buckets))

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        """The engine's thread."""
        drawn: list[_Drawn] = []
        try:
            while True:
                if not drawn:
                    with self._changed:
                        self._changed.wait_for(lambda: self._closing or not self._scheduler.idle)
                        if self._scheduler.idle:
                            return
                # The device gets its next work before the host looks at what came of the last.
                started = self._round()
                for each in drawn:
                    self._receive(each)
                drawn = started
        except BaseException as error:
            self._break(error)

    def _round(self) -> list[_Drawn]:
        """Hands the device one round of work."""
        with self._changed:
            for ticket in self._scheduler.drop_cancelled():
                self._finish(ticket, "cancelled")
            admitted = list(self._scheduler.admit())
            piece = self._scheduler.next_piece()
            decoding = self._scheduler.decoding()
            consuming = self._scheduler.consuming()
        for slot, ticket in admitted:
            self._slots = occupy(self._placement, self._slots, jnp.int32(slot), self._tenant(ticket))
        drawn = []
        if piece is not None:
            drawn += self._consume(*piece)
        if decoding:
            drawn.append(self._decode(decoding, PASSES_BESIDE_PREFILL if consuming else PASSES_IN_A_BLOCK))
        return drawn

    def _tenant(self, ticket: _Ticket) -> Tenant:
        request, text = ticket.request, self._model.config.text
        return Tenant(
            rows=fresh_rows([request.prompt], text.vocab_size, active=[False]),
            sampling=stack_settings([request.settings], [ticket.answer.seed]),
            limits=limits_of(
                [request.settings],
                [request.stop_ids],
                vocab_size=text.vocab_size,
                drawable=self._drawable,
                pad_id=text.pad_token_id or 0,
            ),
        )

    def _consume(self, slot: int, ticket: _Ticket, chunk: Chunk) -> list[_Drawn]:
        """Consumes a piece of a prompt, and after the last one draws the first token."""
        tokens = np.zeros((1, chunk.padded_length), np.int32)
        piece = ticket.request.prompt[chunk.start : chunk.stop]
        tokens[0, : len(piece)] = piece
        segment_ids = (np.arange(chunk.padded_length) < len(piece)).astype(np.int32)[None]
        where = jnp.int32(slot)
        self._slots, _ = prefill_slot(*self._static, self._slots, where, tokens, segment_ids)
        self._count(prompt_tokens=len(piece))
        if chunk != ticket.chunks[-1]:
            return []
        self._slots, emission = start_slot(*self._static, self._slots, where, self._all_allowed(1))
        return [_Drawn(emission, [(slot, ticket)], is_block=False)]

    def _decode(self, tenants: list[tuple[int, _Ticket]], passes: int) -> _Drawn:
        keep = np.zeros(self.memory.slots, bool)
        for slot, ticket in tenants:
            keep[slot] = ticket.answer.reason is None
        self._slots, emissions = decode_slots(
            *self._static, self._slots, keep, self._all_allowed(self.memory.slots), steps=passes
        )
        return _Drawn(emissions, tenants, is_block=True)

    def _receive(self, drawn: _Drawn) -> None:
        """Takes what was drawn into the answers, and frees the slots of those that have ended."""
        emissions = jax.device_get(drawn.emissions)
        for slot, ticket in drawn.tenants:
            if ticket.stream.finished:
                continue
            before = len(ticket.answer.tokens)
            try:
                if drawn.is_block:
                    for each_pass in range(emissions.token.shape[0]):
                        ticket.answer.take_pass(part_of(emissions, each_pass, slice(None), slot))
                else:
                    ticket.answer.take(part_of(emissions, 0))
            except NonFiniteError as error:
                self._free(slot, ticket)
                self._fail(ticket, error)
            self._count(generated_tokens=len(ticket.answer.tokens) - before)
            if ticket.answer.reason is not None:
                self._free(slot, ticket)
                self._finish(ticket, "finished")

    def _all_allowed(self, rows: int) -> Allowed:
        words = -(-self._model.config.text.vocab_size // 32)
        bits = np.full((rows, words), np.iinfo(np.uint32).max, np.uint32)
        return self._placement.put(Allowed(jnp.asarray(bits), jnp.zeros(rows, bool)))

    def _free(self, slot: int, ticket: _Ticket) -> None:
        with self._changed:
            self._scheduler.free(slot, ticket)

    def _finish(self, ticket: _Ticket, how: Literal["finished", "cancelled"]) -> None:
        if ticket.answer.reason is None:
            ticket.answer.end("cancelled")
        self._count(**{how: 1})
        ticket.stream.finish(ticket.answer.generation())

    def _fail(self, ticket: _Ticket, error: BaseException) -> None:
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
            self._fail(ticket, broke)

    def _count(self, **more: int) -> None:
        with self._changed:
            for name, value in more.items():
                self._counts[name] += value

    def _warm_up(self) -> None:
        """Compiles every program, on a request that nobody asked for."""
        vocabulary = self._model.config.text.vocab_size
        settings = GenerationSettings(max_new_tokens=1)
        for bucket in self._buckets:
            tokens = tuple(token % vocabulary for token in range(bucket))
            ticket = dataclasses.replace(
                self._ticket(Request(tokens[: self.memory.context - 1], settings)),
                chunks=[Chunk(0, bucket, bucket)],
            )
            self._slots = occupy(self._placement, self._slots, jnp.int32(0), self._tenant(ticket))
            self._consume(0, ticket, ticket.chunks[0])
        for passes in (PASSES_BESIDE_PREFILL, PASSES_IN_A_BLOCK):
            nobody = np.zeros(self.memory.slots, bool)
            self._slots, _ = decode_slots(
                *self._static, self._slots, nobody, self._all_allowed(self.memory.slots), steps=passes
            )
        self._counts = dict.fromkeys(COUNTED, 0)


def compiled_programs() -> int:
    """Programs that engines of this process have compiled."""
    # JAX has no public way to ask a jitted function for the number of its programs.
    return sum(
        program._cache_size()  # pyright: ignore[reportAttributeAccessIssue]
        for program in (occupy, prefill_slot, start_slot, decode_slots)
    )
