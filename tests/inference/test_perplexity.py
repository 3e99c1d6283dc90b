"""Perplexities: every token once, with the context that was promised, whatever the windows; each starts afresh."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_jax.errors import PromptError
from qwen35_jax.inference import scoring
from qwen35_jax.inference.buckets import prefill_chunks
from qwen35_jax.inference.perplexity import Perplexity, perplexity, sliding_windows
from qwen35_jax.model import forward
from tests.inference.tiny_model import CONTEXT, VOCABULARY, TinyModel

TEXT = np.random.default_rng(3).integers(0, VOCABULARY, 90).tolist()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "prefill_chunks", functools.partial(prefill_chunks, buckets=(16,)))


@functools.partial(jax.jit, static_argnums=0)
def all_logprobs(graphdef: Any, parameters: Any, tokens: Any, segment_ids: Any) -> Any:
    return jax.nn.log_softmax(forward(graphdef, parameters, tokens, segment_ids=segment_ids))


def by_forward(model: TinyModel, window: int, stride: int) -> list[float]:
    """Log-probabilities of the second token to the last, from a pass over each window alone."""
    logprobs: list[float] = []
    for start in range(0, len(TEXT), stride):
        read = TEXT[start : start + window]
        tokens, segment_ids = np.zeros((2, 1, len(TEXT)), np.int32)
        tokens[0, : len(read)] = read
        segment_ids[0, : len(read)] = 1
        table = np.asarray(all_logprobs(model.graphdef, model.parameters, tokens, segment_ids))[0]
        for place in range(len(logprobs), min(start + len(read), len(TEXT) - 1)):
            logprobs.append(float(table[place - start, TEXT[place + 1]]))
    return logprobs


@pytest.mark.parametrize(("window", "stride"), [(40, 20), (40, 7), (32, 32), (89, 1), (300, 11), (1, 1)])
def test_nats_are_those_of_each_window_run_alone(tiny: TinyModel, window: int, stride: int) -> None:
    expected = by_forward(tiny, window, stride)
    assert len(expected) == len(TEXT) - 1
    for batch in (1, 4):
        found = perplexity(tiny, TEXT, window=window, stride=stride, batch=batch)
        assert found.scored_tokens == len(TEXT) - 1
        assert found.nats == pytest.approx(-math.fsum(expected), abs=1e-4)


def test_a_window_starts_from_an_empty_memory_recurrent_states_included(tiny: TinyModel) -> None:
    """The decay is weak: a state that came along from the window before would move these scores."""
    halves = perplexity(tiny, TEXT, window=45, stride=45, batch=1)
    first = perplexity(tiny, TEXT[:46], window=45, stride=45, batch=1)
    second = perplexity(tiny, TEXT[45:], window=45, stride=45, batch=1)
    assert halves.nats == pytest.approx(first.nats + second.nats, abs=1e-4)
    whole = perplexity(tiny, TEXT, window=89, stride=89, batch=1)
    assert abs(whole.nats - halves.nats) > 0.01


@given(length=st.integers(2, 60), window=st.integers(1, 70), stride=st.integers(1, 70))
def test_windows_score_every_token_but_the_first_once_with_the_context_that_was_promised(
    length: int, window: int, stride: int
) -> None:
    stride = min(stride, window)
    text = np.arange(length)
    scored: list[int] = []
    for one in sliding_windows(text, window=window, stride=stride):
        context, tokens = np.asarray(one.context), np.asarray(one.tokens)
        np.testing.assert_array_equal(
            np.concatenate([context, tokens]), np.arange(context[0], tokens[-1] + 1)
        )
        assert len(context) + len(tokens) - 1 <= window
        assert context[0] == 0 or len(context) >= window - stride + 1
        scored += tokens.tolist()
    assert scored == list(range(1, length))


def test_measures_follow_from_nats() -> None:
    measured = Perplexity(scored_tokens=8, nats=16.0, read_tokens=8, seconds=2.0, compile_seconds=1.0)
    assert measured.nats_per_token == 2.0
    assert measured.perplexity == pytest.approx(math.e**2)
    assert measured.bits_per_byte(32) == pytest.approx(0.5 / math.log(2))
    assert measured.tokens_per_second == 4.0
    assert Perplexity(1, 1e6, 1, 1.0, 1.0).perplexity == math.inf


@pytest.mark.parametrize(
    ("tokens", "window", "stride", "complaint"),
    [
        ([], 8, 4, "has 0 tokens, expected at least 2"),
        ([5], 8, 4, "has 1 token,"),
        (TEXT, 0, 4, f"window is 0, expected 1 to {CONTEXT} tokens"),
        (TEXT, CONTEXT + 1, 4, f"window is {CONTEXT + 1}"),
        (TEXT, 8, 0, "stride is 0, expected 1 to 8"),
        (TEXT, 8, 9, "stride is 9, expected 1 to 8"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    tiny: TinyModel, tokens: list[int], window: int, stride: int, complaint: str
) -> None:
    with pytest.raises(PromptError, match=complaint):
        perplexity(tiny, tokens, window=window, stride=stride)
