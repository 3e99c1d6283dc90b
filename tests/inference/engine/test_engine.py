"""The engine: every answer is that of its request alone, whoever else is in the batch and whatever they do."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.errors import CapacityError, NonFiniteError, PromptError, QueueFullError
from qwen35_jax.inference.engine import AnswerStream, Engine, Request
from qwen35_jax.inference.engine.prefix_cache import BLOCK
from qwen35_jax.inference.engine.slot_runner import compiled_programs
from qwen35_jax.inference.generation import generate
from qwen35_jax.inference.settings import GenerationSettings
from qwen35_jax.inference.speculation import Speculation
from qwen35_jax.model import abstract_model, forward
from tests.inference.tiny_model import VOCABULARY, TinyModel, ascii_tokenizer, tiny_model
from tests.small_text_model import FULL, LINEAR, draw, small_config

CONTEXT = 96


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng((seed, length)).integers(0, VOCABULARY - 2, length).tolist())


def request(length: int, new: int, seed: int, **settings) -> Request:
    wanted = GenerationSettings(max_new_tokens=new, seed=seed, **settings)
    return Request(prompt(length, seed), wanted, stop_ids=(7, 11))


def some_requests(count: int, seed: int = 0) -> list[Request]:
    """Greedy and sampled ones, of lengths around the pieces of 32."""
    rng = random.Random(seed)
    return [
        request(
            rng.choice([1, 3, 16, 31, 32, 33, 63, 64, 65]),
            rng.choice([1, 2, 9, 20]),
            seed=index,
            temperature=rng.choice([0.0, 0.9]),
            top_p=rng.choice([1.0, 0.8]),
            repetition_penalty=rng.choice([1.0, 1.3]),
        )
        for index in range(count)
    ]


@pytest.fixture(scope="module")
def tiny() -> TinyModel:
    return tiny_model()


@pytest.fixture(scope="module")
def engine(tiny: TinyModel) -> Iterator[Engine]:
    with Engine(
        tiny, ascii_tokenizer(), slots=3, context=CONTEXT, prefill_tokens=32, queue_limit=40
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def without_tokenizer(tiny: TinyModel) -> Iterator[Engine]:
    with Engine(tiny, slots=1, context=CONTEXT, prefill_tokens=32, queue_limit=2) as engine:
        yield engine


def alone(tiny: TinyModel, request: Request) -> tuple[int, ...]:
    """The answer of plain generation in a batch of its own."""
    result = generate(
        tiny, [request.prompt], request.settings, tokenizer=ascii_tokenizer(), stop_ids=request.stop_ids
    )
    return result.generations[0].tokens


def wait_until_idle(engine: Engine) -> None:
    deadline = time.monotonic() + 60
    while (now := engine.statistics()).occupied or now.queued:
        assert time.monotonic() < deadline, now
        time.sleep(0.01)


def test_b03_b04_answers_are_those_of_each_request_alone_and_nothing_is_compiled(tiny, engine):
    requests = some_requests(24)
    before = compiled_programs()
    streams = [engine.submit(each) for each in requests]
    found = [stream.result(timeout=120).tokens for stream in streams]
    assert compiled_programs() == before == engine.statistics().compiled_programs
    assert found == [alone(tiny, each) for each in requests]
    wait_until_idle(engine)


def test_a_stream_tells_token_by_token_what_the_whole_answer_holds(engine):
    stream = engine.submit(request(20, 12, seed=3))
    events = list(stream)
    whole = stream.result()
    assert tuple(event.token for event in events if event.token is not None) == whole.tokens
    assert "".join(event.text for event in events) == whole.text
    assert [event.finish_reason for event in events if event.finish_reason] == [whole.finish_reason]
    assert all(event.row == stream.number for event in events)


def test_stop_strings_end_an_answer_and_free_its_slot(tiny, engine):
    wanted = GenerationSettings(max_new_tokens=20)
    whole = engine.submit(Request(prompt(9), wanted)).result()
    stop = whole.text[5:7]
    stopped = engine.submit(Request(prompt(9), dataclasses.replace(wanted, stop=(stop,)))).result()
    assert stopped.finish_reason == "stop" and stopped.text == whole.text[: whole.text.index(stop)]
    wait_until_idle(engine)
    assert engine.submit(Request(prompt(9), wanted)).result().tokens == whole.tokens


class Announcing:
    """A grammar that allows everything: its row decodes pass by pass, and each of its tokens is announced."""

    def __init__(self, heard: Callable[[int], None]):
        self._heard = heard
        self._tokens = 0

    def allowed(self) -> np.ndarray:
        return np.full(VOCABULARY // 32 + 1, np.iinfo(np.uint32).max, np.uint32)

    def accept(self, token: int) -> None:
        self._tokens += 1
        self._heard(self._tokens)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_b05_requests_that_come_3_and_7_passes_late_answer_as_alone_and_every_token_is_counted(
    tiny, engine, temperature
):
    first, *late = (
        request(length, new, seed=60 + length, temperature=temperature, min_new_tokens=new)
        for length, new in ((20, 21), (33, 12), (9, 2))
    )
    streams = []

    def heard(tokens: int) -> None:
        if tokens in (1 + 3, 1 + 7):  # the first token of an answer is drawn without a pass
            streams.append(engine.submit(late[len(streams)]))

    found = [engine.submit(dataclasses.replace(first, constraint=Announcing(heard))).result(timeout=60)]
    found += [stream.result(timeout=60) for stream in streams]
    assert [each.tokens for each in found] == [alone(tiny, each) for each in (first, *late)]
    wait_until_idle(engine)
    # They came into the slots in their order. The last token of an answer is drawn and not consumed.
    lengths = engine._runner._slots.memory.cache.lengths.tolist()
    assert lengths == [len(each.prompt_tokens) + len(each.tokens) - 1 for each in found]


def test_b94_without_a_warm_up_programs_are_compiled_for_the_requests_that_need_them(tiny):
    context = CONTEXT + 2 * BLOCK  # unlike those of the other engines, whose programs it would share
    requests = [request(length, 9, seed=length) for length in (6, 9, 33, 3, 40)]
    with Engine(
        tiny, ascii_tokenizer(), slots=1, context=context, prefill_tokens=64, warm_up=False
    ) as engine:
        counts, seconds = [compiled_programs()], [engine.compile_seconds]
        for each in requests:
            assert engine.submit(each).result(timeout=60).tokens == alone(tiny, each)
            counts.append(compiled_programs())
            seconds.append(engine.compile_seconds)
    # Pieces of 16 tokens for the first two, of 64 for the third; then there is nothing new.
    assert counts[0] < counts[1] == counts[2] == counts[3] - 1
    assert counts[3:] == [counts[3]] * 3
    assert 0 == seconds[0] < seconds[1] == seconds[2] < seconds[3] == seconds[5]


def test_requests_that_come_together_to_an_engine_without_a_warm_up_answer_as_alone(tiny):
    requests = some_requests(8, seed=11)
    with Engine(
        tiny, ascii_tokenizer(), slots=3, context=CONTEXT, prefill_tokens=32, warm_up=False
    ) as engine:
        streams = [engine.submit(each) for each in requests]
        found = [stream.result(timeout=120).tokens for stream in streams]
    assert found == [alone(tiny, each) for each in requests]


@pytest.fixture
def decoded_together(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many slots each block of decoding is for, as it happens."""
    counts = []
    decode = engine._runner.decode

    def counted(going_on, constraints, *, passes):
        counts.append(len(going_on))
        return decode(going_on, constraints, passes=passes)

    monkeypatch.setattr(engine._runner, "decode", counted)
    return counts


@pytest.mark.parametrize("place", [0, 1, 2])
def test_b06_the_row_that_is_left_when_its_neighbours_end_answers_as_alone(
    tiny, engine, decoded_together, place
):
    wanted = [request(9, 3, seed=70), request(33, 2, seed=71)]
    wanted.insert(place, request(20, 33, seed=72, min_new_tokens=33, temperature=0.9))
    with engine._changed:  # all at once
        streams = [engine.submit(each) for each in wanted]
    assert [stream.result(timeout=60).tokens for stream in streams] == [alone(tiny, each) for each in wanted]
    assert max(decoded_together) > 1 and decoded_together[-3:] == [1, 1, 1]


def test_b06_a_row_that_is_alone_and_is_joined_and_left_again_answers_as_alone(
    tiny, engine, decoded_together
):
    first = request(20, 60, seed=75, min_new_tokens=60, temperature=0.9)
    joining = [request(9, 3, seed=76), request(33, 12, seed=77, temperature=0.9)]
    streams, heard = [], []

    def notify() -> None:
        heard.append(None)
        if len(heard) == 10:
            streams.extend(map(engine.submit, joining))

    found = [engine.submit(first, notify=notify).result(timeout=60)]
    found += [stream.result(timeout=60) for stream in streams]
    assert [each.tokens for each in found] == [alone(tiny, each) for each in (first, *joining)]
    assert decoded_together[0] == decoded_together[-1] == 1 < max(decoded_together)


def test_b34_a_slot_is_empty_for_its_next_tenant(tiny, without_tokenizer):
    """One slot only: every request follows another into it, the first and last slot at once."""
    requests = some_requests(8, seed=5)
    found = [without_tokenizer.submit(each).result(timeout=60).tokens for each in requests]
    assert found == [
        generate(tiny, [each.prompt], each.settings, stop_ids=each.stop_ids).generations[0].tokens
        for each in requests
    ]


def test_cancelled_requests_give_what_they_had_and_disturb_nobody(tiny, engine):
    before = engine.statistics()
    kept = some_requests(6, seed=1)
    long = [request(40, 50, seed=index, min_new_tokens=50) for index in range(6)]
    mixed: list[AnswerStream] = []
    for one, other in zip(kept, long, strict=True):
        mixed += [engine.submit(one), engine.submit(other)]
    for index, stream in enumerate(mixed[1::2]):
        if index % 2:
            next(iter(stream))  # in a slot, drawing
        stream.cancel()
    cut = [stream.result(timeout=60) for stream in mixed[1::2]]
    assert [stream.result(timeout=60).tokens for stream in mixed[::2]] == [alone(tiny, each) for each in kept]
    assert all(each.finish_reason == "cancelled" for each in cut)
    assert all(
        alone(tiny, wanted)[: len(each.tokens)] == each.tokens for wanted, each in zip(long, cut, strict=True)
    )
    wait_until_idle(engine)
    after = engine.statistics()
    assert after.cancelled - before.cancelled == 6 and after.finished - before.finished == 6


def test_many_clients_at_once_each_get_their_own_answer_and_nothing_is_lost(tiny, engine):
    expected = {each: alone(tiny, each) for each in some_requests(6, seed=2)}
    failures: list[str] = []

    def client(number: int) -> None:
        rng = random.Random(number)
        for _ in range(4):
            wanted = rng.choice(list(expected))
            while True:
                try:
                    stream = engine.submit(wanted)
                    break
                except QueueFullError:
                    time.sleep(0.01)
            if rng.random() < 0.3:
                time.sleep(rng.random() * 0.05)
                stream.cancel()
            elif (found := stream.result(timeout=120).tokens) != expected[wanted]:
                failures.append(f"client {number}: {found} instead of {expected[wanted]}")

    clients = [threading.Thread(target=client, args=(number,)) for number in range(12)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(timeout=180)
    assert not failures
    wait_until_idle(engine)
    now = engine.statistics()
    assert now.submitted == now.finished + now.cancelled + now.failed


def test_a_full_queue_refuses_and_takes_on_again_later(without_tokenizer):
    engine = without_tokenizer
    running = engine.submit(request(4, 90, seed=0, min_new_tokens=90))
    next(iter(running))
    waiting = [engine.submit(request(4, 1, seed=1)) for _ in range(2)]
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        engine.submit(request(4, 1, seed=2))
    running.cancel()
    assert [len(each.result(timeout=60).tokens) for each in waiting] == [1, 1]
    assert engine.submit(request(4, 1, seed=2)).result(timeout=60).tokens


def test_closing_finishes_what_runs_or_cancels_it_and_refuses_the_rest(tiny):
    for finish in (True, False):
        engine = Engine(tiny, slots=1, context=CONTEXT, prefill_tokens=32, queue_limit=3)
        streams = [engine.submit(request(4, 30, seed=seed, min_new_tokens=30)) for seed in range(3)]
        engine.close(finish=finish)
        reasons = {stream.result(timeout=1).finish_reason for stream in streams}
        assert reasons <= ({"length", "stop"} if finish else {"length", "stop", "cancelled"})
        assert finish or "cancelled" in reasons
        assert not engine.healthy
        with pytest.raises(RuntimeError, match="closed"):
            engine.submit(request(4, 1, seed=0))


def test_b95_a_request_on_which_the_model_breaks_fails_alone(tiny):
    weight = tiny.parameters["embed_tokens"]["weight"]
    broken = dataclasses.replace(
        tiny,
        parameters={**tiny.parameters, "embed_tokens": {"weight": weight.at[VOCABULARY - 1].set(np.nan)}},
    )
    # The head is tied: every logit row has a NaN. Only the engine's bookkeeping is looked at here.
    with Engine(broken, slots=1, context=CONTEXT, prefill_tokens=32) as engine:
        with pytest.raises(NonFiniteError, match="step 0"):
            engine.submit(request(4, 5, seed=0)).result(timeout=60)
        wait_until_idle(engine)
        assert engine.statistics().failed == 1


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        (Request(()), "empty"),
        (Request((1, 2, VOCABULARY)), "97"),
        (request(90, 20, seed=0), "90 tokens and 20 more"),
        (Request((1,), GenerationSettings(stop=("x",))), "tokenizer"),
        (Request((1,), stop_ids=tuple(range(9))), "9 stop ids"),
    ],
)
def test_what_cannot_be_run_is_refused_when_it_is_submitted(without_tokenizer, wanted, complaint):
    with pytest.raises(PromptError, match=complaint):
        without_tokenizer.submit(wanted)


def test_an_answer_is_as_long_as_its_slot_allows_where_nothing_is_asked_for(without_tokenizer):
    assert len(without_tokenizer.submit(Request(prompt(90))).result(timeout=60).tokens) == CONTEXT - 90


@pytest.mark.parametrize(
    ("options", "error", "complaint"),
    [
        ({"slots": 0}, PromptError, "slots is 0"),
        ({"queue_limit": 0}, PromptError, "queue_limit is 0"),
        ({"prefill_tokens": 100}, PromptError, "prefill_tokens is 100"),
        ({"context": 10_000}, PromptError, "context is 10000"),
        ({"slots": 10_000_000}, CapacityError, "ask for fewer slots"),
    ],
)
def test_engines_that_cannot_be_are_refused_before_anything_is_compiled(tiny, options, error, complaint):
    before = compiled_programs()
    with pytest.raises(error, match=complaint):
        Engine(tiny, **options)
    assert compiled_programs() == before


def test_b36_speculating_slots_give_the_answers_of_plain_decoding():
    config = small_config((LINEAR, FULL))
    graphdef, abstract = abstract_model(config, parameter_dtype="float32", dtype="float32", mtp=True)
    model = TinyModel(config, graphdef, jax.tree_util.tree_map_with_path(draw, abstract))
    requests = some_requests(8, seed=4)
    with Engine(
        model, ascii_tokenizer(), slots=2, context=CONTEXT, prefill_tokens=32, speculation=Speculation(2)
    ) as engine:
        streams = [engine.submit(each) for each in requests]
        found = [stream.result(timeout=120) for stream in streams]
    assert [each.tokens for each in found] == [alone(model, each) for each in requests]
    assert all(each.tokens_per_pass >= 1 for each in found if len(each.tokens) > 1)


class OnlyMultiples:
    """A grammar of token ids: a multiple of 3 comes after one of 5 and the other way round."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def allowed(self) -> np.ndarray:
        factor = 5 if len(self.accepted) % 2 else 3
        bits = np.zeros(VOCABULARY // 32 + 1, np.uint32)
        for token in range(factor, VOCABULARY, factor):
            bits[token // 32] |= np.uint32(1 << token % 32)
        return bits

    def accept(self, token: int) -> None:
        self.accepted.append(token)


def test_a_grammar_decides_every_token_and_disturbs_nobody(tiny, engine):
    before = compiled_programs()
    grammar = OnlyMultiples()
    asked = Request(prompt(40, seed=5), GenerationSettings(max_new_tokens=7))
    others = some_requests(6, seed=9)
    streams = [engine.submit(each) for each in others[:3]]
    constrained = engine.submit(dataclasses.replace(asked, constraint=grammar))
    streams += [engine.submit(each) for each in others[3:]]
    found = constrained.result(timeout=120)
    # The same by hand: all tokens that the grammar leaves, the most likely one of them, and again.
    expected, oracle = [], OnlyMultiples()
    for _ in range(7):
        tokens = jnp.array([[*asked.prompt, *expected]])
        logits = forward(tiny.graphdef, tiny.parameters, tokens, rematerialize="none")[0, -1]
        factor = 5 if len(oracle.accepted) % 2 else 3
        expected.append(int(max(range(factor, VOCABULARY, factor), key=lambda token: logits[token])))
        oracle.accept(expected[-1])
    assert list(found.tokens) == expected == grammar.accepted
    assert [stream.result(timeout=120).tokens for stream in streams] == [alone(tiny, each) for each in others]
    assert compiled_programs() == before


def test_grammars_that_come_while_others_draw_end_nobodys_row(tiny, engine):
    beside = request(9, 70, seed=2, ignore_eos=True)
    running = engine.submit(beside)
    next(iter(running))
    asked = Request(prompt(40, seed=5), GenerationSettings(max_new_tokens=7))
    streams = [engine.submit(dataclasses.replace(asked, constraint=OnlyMultiples())) for _ in range(4)]
    found = [stream.result(timeout=120).tokens for stream in streams]
    assert len(set(found)) == 1 and len(found[0]) == 7
    assert running.result(timeout=60).tokens == alone(tiny, beside)


def test_a_grammar_that_cannot_tell_what_is_next_ends_its_own_request_only(tiny, engine):
    class Mute(OnlyMultiples):
        def __init__(self, after: int) -> None:
            super().__init__()
            self.after = after

        def allowed(self) -> np.ndarray:
            if len(self.accepted) == self.after:
                raise PromptError("the grammar grew too large")
            return super().allowed()

    beside = request(9, 30, seed=1, ignore_eos=True)
    other = engine.submit(beside)
    for after in (0, 2):
        asked = Request(prompt(4), GenerationSettings(max_new_tokens=9), constraint=Mute(after))
        with pytest.raises(PromptError, match="too large"):
            engine.submit(asked).result(timeout=60)
    assert other.result(timeout=60).tokens == alone(tiny, beside)
    wait_until_idle(engine)


def test_a_grammar_that_fails_ends_its_own_request_only(tiny, engine):
    class Failing(OnlyMultiples):
        def accept(self, token: int) -> None:
            super().accept(token)
            if len(self.accepted) == 3:
                raise PromptError("the grammar is at its end")

    asked = Request(prompt(4), GenerationSettings(max_new_tokens=9))
    stream = engine.submit(dataclasses.replace(asked, constraint=Failing()))
    beside = request(9, 12, seed=1)
    other = engine.submit(beside)
    with pytest.raises(PromptError, match="at its end"):
        stream.result(timeout=60)
    assert other.result(timeout=60).tokens == alone(tiny, beside)
    wait_until_idle(engine)
