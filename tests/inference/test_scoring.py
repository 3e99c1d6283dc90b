"""Scores of given tokens: those of the whole sequence run at once, whatever they are scored beside and after what.

Rows are cut into pieces of 16 tokens, so that many take several pieces and few programs are compiled.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.errors import NonFiniteError, PromptError
from qwen35_jax.inference import scoring
from qwen35_jax.inference.buckets import prefill_chunks
from qwen35_jax.inference.scoring import Continuation, TokenScores, score
from qwen35_jax.model import forward
from qwen35_jax.nn.text_model import TextModel
from tests.inference.tiny_model import CONTEXT, VOCABULARY, TinyModel
from tests.small_text_model import small_model


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "prefill_chunks", functools.partial(prefill_chunks, buckets=(16,)))


def document(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, VOCABULARY, length).tolist()


def continuation(context: int, tokens: int, seed: int = 0) -> Continuation:
    return Continuation(document(context, seed), document(tokens, seed + 1))


@functools.partial(jax.jit, static_argnums=0)
def all_logprobs(graphdef: Any, parameters: Any, tokens: Any, segment_ids: Any) -> Any:
    return jax.nn.log_softmax(forward(graphdef, parameters, tokens, segment_ids=segment_ids))


def by_forward(model: Any, wanted: Continuation, padded_length: int = 96) -> TokenScores:
    """Scores from one pass over everything, without a cache."""
    ids = np.array([*wanted.context, *wanted.tokens])
    tokens, segment_ids = np.zeros((2, 1, padded_length), np.int32)
    tokens[0, : len(ids)] = ids
    segment_ids[0, : len(ids)] = 1
    table = np.asarray(all_logprobs(model.graphdef, model.parameters, tokens, segment_ids))[0]
    predicting = np.arange(len(wanted.context), len(ids)) - 1
    targets = ids[len(wanted.context) :]
    return TokenScores(table[predicting, targets], table[predicting].argmax(axis=-1) == targets)


def assert_equal(found: Sequence[TokenScores], expected: Sequence[TokenScores], bound: float) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=bound)
        np.testing.assert_array_equal(one.greedy, other.greedy)


MIXED = [continuation(*sizes) for sizes in ((1, 1), (1, 40), (40, 1), (17, 16), (16, 17), (33, 50), (5, 3))]


def test_scores_are_those_of_the_whole_sequence_run_at_once(tiny: TinyModel) -> None:
    table = all_logprobs(tiny.graphdef, tiny.parameters, *np.ones((2, 1, 96), np.int32))
    greedy = Continuation([1] * 20, [int(table[0, 19].argmax())])
    wanted = [*MIXED, greedy]
    found = score(tiny, wanted, batch=3)
    assert_equal(found.scores, [by_forward(tiny, one) for one in wanted], 1e-5)
    assert found.scores[-1].greedy.all() and not all(one.greedy.all() for one in found.scores)
    assert found.scores[1].total == pytest.approx(found.scores[1].logprobs.sum())
    assert found.seconds > 0 and found.compile_seconds > 0


def test_scores_in_float64_are_exact(x64: None) -> None:
    small = small_model("float64")
    model = TinyModel(small.config, small.graphdef, small.parameters)
    found = score(model, MIXED, batch=4)
    assert found.scores[0].logprobs.dtype == np.float64
    assert_equal(found.scores, [by_forward(model, one) for one in MIXED], 1e-12)


def test_continuations_of_one_context_read_it_once_and_get_the_scores_that_each_alone_gets(
    tiny: TinyModel,
) -> None:
    contexts = [document(length, seed=5) for length in (40, 3, 21)]
    answers = [document(length, seed=6) for length in (1, 4, 20, 2)]
    wanted = [Continuation(context, answer) for answer in answers for context in contexts]
    together = score(tiny, [*wanted, MIXED[3]], batch=2)
    assert_equal(together.scores, [by_forward(tiny, one) for one in [*wanted, MIXED[3]]], 1e-5)
    # Each context but its last token once, then that token and an answer but its last token for each continuation.
    assert together.read_tokens == sum((39, 2, 20)) + 3 * sum(map(len, answers)) + 17 + 16 - 1


def test_a_score_does_not_depend_on_what_runs_beside_it(tiny: TinyModel) -> None:
    alone = [score(tiny, [one], batch=1).scores[0] for one in MIXED[:4]]
    for batch in (2, 8):
        found = score(tiny, list(reversed(MIXED[:4])), batch=batch)
        assert_equal(found.scores[::-1], alone, 1e-5)


def test_lengths_compile_nothing_anew(tiny: TinyModel) -> None:
    score(tiny, [continuation(30, 30), continuation(400, 1)], batch=2)
    programs = scoring._score_chunk._cache_size()
    score(tiny, [continuation(length, 3 + length % 5) for length in range(1, 120, 13)], batch=2)
    assert scoring._score_chunk._cache_size() == programs


def test_no_logits_of_a_whole_piece_are_held_and_blocks_change_no_score(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = score(tiny, MIXED, batch=5).scores
    sizes = []
    logits_of = TextModel.logits

    def noted(self: Any, hidden: jax.Array) -> jax.Array:
        sizes.append(hidden.shape)
        return logits_of(self, hidden)

    monkeypatch.setattr(TextModel, "logits", noted)
    monkeypatch.setattr(scoring, "LOGITS_IN_A_BLOCK", 5 * 4 * VOCABULARY)
    scoring._score_chunk.clear_cache()
    try:
        assert_equal(score(tiny, MIXED, batch=5).scores, whole, 1e-5)
    finally:
        scoring._score_chunk.clear_cache()
    assert {shape[:2] for shape in sizes} == {(5, 4)}


def test_scored_tokens_are_told_as_they_come(tiny: TinyModel) -> None:
    told: list[tuple[int, TokenScores]] = []
    found = score(tiny, MIXED, batch=3, on_scored=lambda *news: told.append(news))
    assert len(told) == len(MIXED)
    assert all(scores is found.scores[number] for number, scores in told)


def test_a_context_may_be_as_long_as_the_models(tiny: TinyModel) -> None:
    longest = continuation(CONTEXT - 4, 5)
    found = score(tiny, [longest], batch=1)
    assert_equal(found.scores, [by_forward(tiny, longest, padded_length=704)], 2e-5)


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        (Continuation([], [1]), r"continuation 1: its context have shape \(0,\)"),
        (Continuation([1], []), r"its tokens have shape \(0,\)"),
        (Continuation([[1]], [1]), r"shape \(1, 1\)"),
        (Continuation([1.5], [1]), "float64, expected whole numbers"),
        (Continuation([1], [97]), "hold 97, expected ids from 0 to 96"),
        (Continuation([-1], [3]), "hold -1"),
        (continuation(CONTEXT - 3, 5), f"has {CONTEXT + 1} tokens before its last one"),
    ],
)
def test_bad_continuations_are_refused_by_name(
    tiny: TinyModel, wanted: Continuation, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "_Run", None)  # nothing may run
    with pytest.raises(PromptError, match=complaint):
        score(tiny, [MIXED[0], wanted])


def test_an_impossible_batch_is_refused_and_nothing_gives_nothing(tiny: TinyModel) -> None:
    with pytest.raises(PromptError, match="batch is 0"):
        score(tiny, MIXED, batch=0)
    assert score(tiny, []).scores == ()


def test_logits_that_are_no_numbers_are_refused(tiny: TinyModel) -> None:
    norm = tiny.parameters["final_norm"]
    broken = {"weight": norm["weight"].at[0].set(jnp.nan)}
    with pytest.raises(NonFiniteError, match="continuation 0"):
        score(dataclasses.replace(tiny, parameters=tiny.parameters | {"final_norm": broken}), MIXED[:1])
