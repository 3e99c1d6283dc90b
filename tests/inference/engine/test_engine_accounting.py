"""The engine's books: whatever comes and goes, each request is counted once and nothing of it stays behind."""

from __future__ import annotations

import collections
import dataclasses
import random
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest

from qwen35_jax.errors import PromptError, QueueFullError
from qwen35_jax.inference.engine import AnswerStream, Engine, Request
from qwen35_jax.inference.engine.prefix_cache import BLOCK
from qwen35_jax.inference.settings import GenerationSettings
from tests.inference.tiny_model import VOCABULARY, ascii_tokenizer, tiny_model


class GivesUp:
    """A grammar that allows everything, and breaks at the third token."""

    def __init__(self) -> None:
        self._left = 3

    def allowed(self) -> np.ndarray:
        return np.full(VOCABULARY // 32 + 1, np.iinfo(np.uint32).max, np.uint32)

    def accept(self, token: int) -> None:
        self._left -= 1
        if not self._left:
            raise PromptError("the grammar gives up")


def some_requests() -> list[Request]:
    """Some of their prompts begin with the same block, which is remembered."""
    rng = np.random.default_rng(0)
    beginning = rng.integers(0, 60, BLOCK)
    prompts = [rng.integers(0, 60, length) for length in (1, 20, 33, 65)]
    prompts += [np.append(beginning, rng.integers(0, 60, length)) for length in (1, 9, 12)]
    return [
        Request(
            tuple(prompt.tolist()),
            GenerationSettings(max_new_tokens=new, seed=new, temperature=0.9 * (new % 2)),
            stop_ids=(7, 11),
        )
        for prompt, new in zip(prompts, (9, 20, 5, 1, 12, 20, 13), strict=True)
    ]


REQUESTS = some_requests()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(
        tiny_model(),
        ascii_tokenizer(),
        slots=3,
        context=96,
        prefill_tokens=32,
        queue_limit=4,
        prefix_cache_bytes=150_000,
    ) as engine:
        yield engine


class Clients:
    """Submits and cancels at random whenever the engine is about to give the device work, in the engine's thread.

    So nothing depends on the timing of threads: a seed always gives the same run.
    """

    def __init__(self, engine: Engine, seed: int, most: int):
        self._engine = engine
        self._rng = random.Random(seed)
        self._most = most
        self.submitted: list[tuple[Request, AnswerStream]] = []
        self.refused = 0
        self.cancelled_while: collections.Counter[str] = collections.Counter()

    def come_and_go(self) -> None:
        if self._rng.random() < 0.5:
            self.submit()
        if self._rng.random() < 0.15:
            self._cancel(self._rng.choice(self._engine._scheduler.everyone()).stream)

    def submit(self) -> None:
        if len(self.submitted) == self._most:
            return
        wanted = self._rng.choice(REQUESTS)
        if self._rng.random() < 0.2:
            wanted = dataclasses.replace(wanted, constraint=GivesUp())
        try:
            self.submitted.append((wanted, self._engine.submit(wanted)))
        except QueueFullError:
            self.refused += 1

    def _cancel(self, stream: AnswerStream) -> None:
        scheduler = self._engine._scheduler
        decoding = [ticket.stream for _, ticket in scheduler.decoding()]
        consuming = [ticket.stream for _, ticket in scheduler.tenants()]
        where = "decoding" if stream in decoding else "consuming" if stream in consuming else "queued"
        self.cancelled_while[where] += 1
        stream.cancel()


def before(function: Callable, first: Callable[[], None]) -> Callable:
    def both(*arguments, **options):
        first()
        return function(*arguments, **options)

    return both


def wait_until_idle(engine: Engine) -> None:
    deadline = time.monotonic() + 60
    while (now := engine.statistics()).occupied or now.queued:
        assert time.monotonic() < deadline, now
        time.sleep(0.01)


def check_what_is_kept(engine: Engine) -> None:
    """Held are exactly the blocks of the kept prefixes, each once, and their snapshots."""
    cache = engine._prefixes
    uses = collections.Counter(name for prefix in cache._prefixes.values() for name in prefix.blocks)
    assert uses == {name: block.prefixes for name, block in cache._blocks.items()}
    kept = [block.content for block in cache._blocks.values()]
    kept += [prefix.snapshot for prefix in cache._prefixes.values()]
    now = cache.statistics()
    assert now.held == sum(array.nbytes for array in jax.tree.leaves(kept)) <= now.budget
    assert now.snapshots == len(cache._prefixes)


def test_whatever_comes_and_goes_every_request_is_counted_once_and_nothing_stays_behind(engine, monkeypatch):
    answers: dict[tuple[int, ...], tuple[int, ...]] = {}
    cancelled_while: collections.Counter[str] = collections.Counter()
    refused = 0
    for seed in range(8):
        clients = Clients(engine, seed, most=30)
        old = engine.statistics()
        with monkeypatch.context() as patch:
            for name in ("consume", "decode"):
                patch.setattr(
                    engine._runner, name, before(getattr(engine._runner, name), clients.come_and_go)
                )
            with engine._changed:  # the engine begins when both are there
                clients.submit()
                clients.submit()
            wait_until_idle(engine)
        new = engine.statistics()

        outcomes = collections.Counter()
        tokens = 0
        for wanted, stream in clients.submitted:
            assert stream.finished
            drawn = tuple(event.token for event in stream.poll() if event.token is not None)
            tokens += len(drawn)
            try:
                outcome = "cancelled" if stream.result().finish_reason == "cancelled" else "finished"
            except PromptError:
                outcome = "failed"
            outcomes[outcome] += 1
            # Answers to the same prompt are the same, and what was cancelled or failed is the beginning of one.
            if outcome == "finished":
                assert answers.setdefault(wanted.prompt, drawn) == drawn == stream.result().tokens
            whole = answers.get(wanted.prompt, drawn)
            assert drawn == whole[: len(drawn)]
        assert new.submitted - old.submitted == len(clients.submitted) == sum(outcomes.values())
        for name in ("finished", "cancelled", "failed"):
            assert getattr(new, name) - getattr(old, name) == outcomes[name], name
        assert new.submitted == new.finished + new.cancelled + new.failed
        assert new.generated_tokens - old.generated_tokens == tokens
        assert (new.occupied, new.queued) == (0, 0)
        assert engine._scheduler.everyone() == []
        check_what_is_kept(engine)
        cancelled_while += clients.cancelled_while
        refused += clients.refused
    last = engine.statistics()  # all of it did happen
    assert cancelled_while.keys() == {"queued", "consuming", "decoding"}
    assert min(refused, last.finished, last.failed, last.prefix_cache.evicted, last.prefix_cache.hits) > 0
