"""Beam search beside one that runs every beam's whole text anew at each step, and sees nothing of a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.cache import AttentionCache, Cache
from qwen35_jax.errors import NonFiniteError, PromptError
from qwen35_jax.inference import beam_search as module
from qwen35_jax.inference.beam_search import Beam, beam_search
from qwen35_jax.inference.cache_rows import take_rows
from qwen35_jax.inference.generation import generate
from qwen35_jax.inference.settings import GenerationSettings
from qwen35_jax.inference.tokenizer import Tokenizer
from qwen35_jax.model import forward
from tests.inference.tiny_model import CONTEXT, VOCABULARY, TinyModel

PROMPT = np.random.default_rng(8).integers(1, 95, 21).tolist()
NEW = 12


@jax.jit(static_argnums=0)
def next_logprobs(graphdef, parameters, tokens, length):
    segment_ids = (jnp.arange(tokens.shape[1]) < length)[None].astype(jnp.int32).repeat(tokens.shape[0], 0)
    return jax.nn.log_softmax(forward(graphdef, parameters, tokens, segment_ids=segment_ids)[:, length - 1])


def by_brute_force(
    model: TinyModel, beams: int, length_penalty: float, stop_ids: Sequence[int], new: int = NEW
) -> list[Beam]:
    """The same search over whole texts, without an early end."""
    living: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    answers: list[Beam] = []

    def ended(logprob: float, tokens: tuple[int, ...]) -> Beam:
        return Beam(tokens, logprob, logprob / len(tokens) ** length_penalty)

    for _ in range(new):
        padded = np.zeros((beams, len(PROMPT) + NEW), np.int32)
        for row, (_, drawn) in enumerate(living):
            padded[row, : len(PROMPT) + len(drawn)] = [*PROMPT, *drawn]
        length = len(PROMPT) + len(living[0][1])
        table = np.asarray(next_logprobs(model.graphdef, model.parameters, padded, length), np.float64)
        candidates = sorted(
            (
                (logprob + table[row, token], (*drawn, token))
                for row, (logprob, drawn) in enumerate(living)
                for token in range(VOCABULARY)
            ),
            reverse=True,
        )
        answers += [ended(*one) for one in candidates[:beams] if one[1][-1] in stop_ids]
        answers = sorted(answers, key=lambda beam: -beam.score)[:beams]
        living = [one for one in candidates if one[1][-1] not in stop_ids][:beams]
    answers += [ended(*one) for one in living]
    return sorted(answers, key=lambda beam: -beam.score)[:beams]


def assert_same(found: Sequence[Beam], expected: Sequence[Beam]) -> None:
    assert [beam.tokens for beam in found] == [beam.tokens for beam in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.score == pytest.approx(other.score, abs=1e-4)


@pytest.fixture(scope="module")
def stops(tiny: TinyModel) -> tuple[int, ...]:
    """Tokens that beams come upon early, late and often."""
    best = by_brute_force(tiny, 3, 0.0, ())
    return tuple(sorted({best[0].tokens[5], best[2].tokens[9], best[1].tokens[2]}))


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.5, -0.5])
def test_b38_sequences_and_scores_are_those_of_a_search_without_a_cache(
    tiny: TinyModel, stops: tuple[int, ...], length_penalty: float
) -> None:
    sizes = {"beams": 3, "max_new_tokens": NEW, "length_penalty": length_penalty}
    for ids in ((), stops):
        expected = by_brute_force(tiny, 3, length_penalty, ids)
        found = beam_search(tiny, PROMPT, **sizes, stop_ids=ids)
        assert_same(found, expected)
        assert len({beam.tokens for beam in found}) == 3
    shorter = beam_search(tiny, PROMPT, **sizes | {"max_new_tokens": 3}, stop_ids=stops)
    assert_same(shorter, by_brute_force(tiny, 3, length_penalty, stops, new=3))


def test_b38_a_reordering_that_forgets_the_recurrent_layers_would_be_noticed(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keys_and_values_only(cache: Cache, rows: jax.Array) -> Cache:
        taken = take_rows(cache, rows)
        if rows.shape[0] != cache.lengths.shape[0]:
            return taken
        groups = tuple(
            tuple(
                new if isinstance(new, AttentionCache) else old for old, new in zip(olds, news, strict=True)
            )
            for olds, news in zip(cache.groups, taken.groups, strict=True)
        )
        return dataclasses.replace(taken, groups=groups)

    expected = by_brute_force(tiny, 3, 0.0, ())
    monkeypatch.setattr(module, "take_rows", keys_and_values_only)
    module._search.clear_cache()
    found = beam_search(tiny, PROMPT, beams=3, max_new_tokens=NEW, length_penalty=0.0, stop_ids=())
    module._search.clear_cache()
    assert [beam.tokens for beam in found] != [beam.tokens for beam in expected]


def test_one_beam_is_greedy_decoding(tiny: TinyModel) -> None:
    (greedy,) = generate(tiny, [PROMPT], GenerationSettings(max_new_tokens=NEW), stop_ids=()).generations
    (beam,) = beam_search(tiny, PROMPT, beams=1, max_new_tokens=NEW, stop_ids=())
    assert beam.tokens == greedy.tokens


def test_more_beams_find_likelier_answers(tiny: TinyModel) -> None:
    best = [
        beam_search(tiny, PROMPT, beams=beams, max_new_tokens=NEW, length_penalty=0.0, stop_ids=())[0].logprob
        for beams in (1, 3)
    ]
    assert best[1] > best[0]


def test_ids_without_a_token_are_never_drawn(tiny: TinyModel, ascii_tokenizer: Tokenizer) -> None:
    embedding = tiny.parameters["embed_tokens"]["weight"]
    loud = dataclasses.replace(
        tiny,
        parameters=tiny.parameters | {"embed_tokens": {"weight": embedding.at[96].set(40 * embedding[5])}},
    )
    sizes = {"beams": 3, "max_new_tokens": NEW, "stop_ids": ()}
    assert any(96 in beam.tokens for beam in beam_search(loud, PROMPT, **sizes))
    assert not any(
        96 in beam.tokens for beam in beam_search(loud, PROMPT, **sizes, tokenizer=ascii_tokenizer)
    )


def test_numbers_and_lengths_compile_nothing_anew(tiny: TinyModel) -> None:
    beam_search(tiny, PROMPT, beams=3, max_new_tokens=NEW, stop_ids=())
    programs = module._search._cache_size()
    beam_search(tiny, PROMPT[:9], beams=3, max_new_tokens=5, length_penalty=0.3, stop_ids=(4, 8))
    assert module._search._cache_size() == programs


def test_what_cannot_be_searched_is_refused(tiny: TinyModel) -> None:
    for arguments, complaint in (
        ({"beams": 0}, "beams is 0"),
        ({"length_penalty": float("nan")}, "length_penalty is nan"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": CONTEXT}, "the model's context is 700"),
        ({"stop_ids": ["x"]}, "stop_ids is"),
    ):
        with pytest.raises(PromptError, match=complaint):
            beam_search(tiny, PROMPT, **{"beams": 3, "max_new_tokens": NEW, "stop_ids": ()} | arguments)
    norm = {"weight": tiny.parameters["final_norm"]["weight"].at[0].set(jnp.nan)}
    broken = dataclasses.replace(tiny, parameters=tiny.parameters | {"final_norm": norm})
    with pytest.raises(NonFiniteError):
        beam_search(broken, PROMPT, beams=3, max_new_tokens=NEW, stop_ids=())
