"""Log-probabilities are the model's own, and a bias moves draws without moving them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.errors import PromptError
from qwen35_jax.inference.generation import generate
from qwen35_jax.inference.results import Generation, TokenEvent
from qwen35_jax.inference.settings import GenerationSettings
from qwen35_jax.inference.tokenizer import Tokenizer
from qwen35_jax.model import forward
from tests.inference.tiny_model import VOCABULARY, TinyModel

PROMPT = [5, 17, 3, 80, 41]
SETTINGS = GenerationSettings(
    max_new_tokens=9, temperature=1.3, top_k=40, repetition_penalty=1.4, seed=3, top_logprobs=4
)


def expected_logprobs(tiny: TinyModel, answer: Generation, drawable: int) -> np.ndarray:
    """[token vocab], of the whole sequence at once."""
    tokens = jnp.array([[*answer.prompt_tokens, *answer.tokens[:-1]]])
    logits = forward(tiny.graphdef, tiny.parameters, tokens, rematerialize="none")[0, len(PROMPT) - 1 :]
    return np.asarray(jax.nn.log_softmax(logits[:, :drawable], axis=-1))


def test_logprobs_are_those_of_the_model_whatever_the_settings_made_of_them(
    tiny: TinyModel, ascii_tokenizer: Tokenizer
) -> None:
    for tokenizer in (None, ascii_tokenizer):
        events: list[TokenEvent] = []
        (answer,) = generate(
            tiny, [PROMPT], SETTINGS, tokenizer=tokenizer, on_token=events.append
        ).generations
        # Rows of the embedding without a token have no part in the probabilities.
        drawable = VOCABULARY if tokenizer is None else ascii_tokenizer.vocabulary_size
        expected = expected_logprobs(tiny, answer, drawable)
        assert answer.logprobs is not None and len(answer.logprobs) == len(answer.tokens) == 9
        for told, token, values in zip(answer.logprobs, answer.tokens, expected, strict=True):
            assert told.token == token
            assert told.logprob == pytest.approx(values[token], abs=1e-5)
            order = np.argsort(-values)[:4]
            assert [token for token, _ in told.top] == order.tolist()
            np.testing.assert_allclose([value for _, value in told.top], values[order], atol=1e-5)
        assert [event.logprob for event in events if event.token is not None] == list(answer.logprobs)


def test_rows_that_ask_for_logprobs_and_rows_that_do_not_share_a_batch(tiny: TinyModel) -> None:
    silent = dataclasses.replace(SETTINGS, top_logprobs=None)
    bare = dataclasses.replace(SETTINGS, top_logprobs=0)
    answers = generate(tiny, [PROMPT] * 3, [SETTINGS, silent, bare]).generations
    assert len({answer.tokens for answer in answers}) == 1
    assert answers[1].logprobs is None
    assert answers[0].logprobs is not None and answers[2].logprobs is not None
    for told, without in zip(answers[0].logprobs, answers[2].logprobs, strict=True):
        assert without == dataclasses.replace(told, top=())


def test_a_bias_forces_and_forbids_tokens_and_changes_no_logprob(tiny: TinyModel) -> None:
    greedy = GenerationSettings(max_new_tokens=3, top_logprobs=1)
    forced = dataclasses.replace(greedy, logit_bias={61: 100.0})
    (plain, biased) = generate(tiny, [PROMPT] * 2, [greedy, forced]).generations
    assert biased.tokens == (61, 61, 61)
    assert plain.logprobs is not None and biased.logprobs is not None
    assert biased.logprobs[0].top == plain.logprobs[0].top
    forbidden = dataclasses.replace(greedy, logit_bias={plain.tokens[0]: -100.0})
    assert generate(tiny, [PROMPT], forbidden).generations[0].tokens[0] != plain.tokens[0]


def test_a_frequency_penalty_grows_with_every_repetition(tiny: TinyModel) -> None:
    often = GenerationSettings(max_new_tokens=12, logit_bias={61: 30.0, 62: 29.0}, frequency_penalty=0.6)
    tokens = generate(tiny, [PROMPT], often).generations[0].tokens
    assert set(tokens) == {61, 62} and 4 <= tokens.count(61) <= 8


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"top_logprobs": 21}, "top_logprobs is 21"),
        ({"top_logprobs": True}, "top_logprobs is True"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"logit_bias": [1]}, "logit_bias is"),
        ({"logit_bias": {-1: 1.0}}, "token id of logit_bias is -1"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias of 1 is inf"),
        ({"logit_bias": dict.fromkeys(range(301), 0.0)}, "301 ids"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(fields, complaint) -> None:
    with pytest.raises(PromptError, match=complaint):
        GenerationSettings(**fields)


def test_a_bias_of_a_token_that_the_model_has_not_is_refused(tiny: TinyModel) -> None:
    with pytest.raises(PromptError, match=f"logit_bias names token {VOCABULARY}"):
        generate(tiny, [PROMPT], GenerationSettings(logit_bias={VOCABULARY: 1.0}))
