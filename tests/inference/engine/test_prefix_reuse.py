"""An engine that goes on from what it remembers answers as one that consumes every prompt from its start."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.cache import DeltaNetCache, init_cache
from qwen35_jax.inference.engine import Engine, Request
from qwen35_jax.inference.engine.prefix_cache import BLOCK
from qwen35_jax.inference.engine.slot_runner import compiled_programs
from qwen35_jax.inference.generation import generate
from qwen35_jax.inference.results import Generation
from qwen35_jax.inference.settings import GenerationSettings
from qwen35_jax.inference.speculation import Speculation
from qwen35_jax.model import abstract_model, prefill
from tests.inference.tiny_model import TinyModel
from tests.small_text_model import FULL, LINEAR, draw, small_config

SETTINGS = GenerationSettings(max_new_tokens=9, top_logprobs=3)


@pytest.fixture(scope="module")
def model() -> TinyModel:
    config = small_config((LINEAR, FULL))
    graphdef, abstract = abstract_model(config, parameter_dtype="float32", dtype="float32", mtp=True)
    return TinyModel(config, graphdef, jax.tree_util.tree_map_with_path(draw, abstract))


@pytest.fixture(scope="module", params=[None, Speculation(3)], ids=["plain", "speculating"])
def engine(model, request) -> Iterator[Engine]:
    with Engine(
        model,
        slots=2,
        context=4 * BLOCK,
        prefill_tokens=64,
        speculation=request.param,
        prefix_cache_bytes=2**26,
    ) as engine:
        yield engine


def text(length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 60, length).tolist())


def ask(engine: Engine, prompt: tuple[int, ...], **settings) -> Generation:
    return engine.submit(Request(prompt, dataclasses.replace(SETTINGS, **settings))).result(timeout=120)


def check_as_alone(model: TinyModel, found: Generation) -> None:
    cold = generate(model, [found.prompt_tokens], SETTINGS).generations[0]
    assert found.tokens == cold.tokens
    for ours, theirs in zip(found.logprobs, cold.logprobs, strict=True):
        np.testing.assert_allclose(
            [value for _, value in ours.top], [value for _, value in theirs.top], atol=1e-5
        )


@pytest.mark.parametrize("shared", [BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2, 2 * BLOCK, 2 * BLOCK + 7])
def test_b35_prompts_that_begin_alike_get_the_answers_of_a_cold_run(model, engine, shared):
    before = compiled_programs()
    beginning = text(shared, seed=shared)
    prompts = [beginning + text(20, seed) for seed in (1, 2, 1, 3)]
    found = [ask(engine, prompt) for prompt in prompts]
    for each in found:
        check_as_alone(model, each)
    assert found[0].cached_tokens == 0
    # What is shared is cut back to the last snapshot, at the end of a block; of the whole prompt one is kept as well.
    assert found[3].cached_tokens == shared // BLOCK * BLOCK
    assert found[2].cached_tokens >= len(prompts[0]) // BLOCK * BLOCK
    assert compiled_programs() == before


def test_where_prompts_part_a_snapshot_is_kept_for_the_next_one(engine):
    beginning = text(2 * BLOCK + 5, seed=50)
    lengths = [ask(engine, beginning + text(60, seed), max_new_tokens=1).cached_tokens for seed in (5, 6, 7)]
    assert lengths == [0, 2 * BLOCK, 2 * BLOCK]
    early = beginning[:BLOCK] + text(100, seed=8)
    assert ask(engine, early, max_new_tokens=1).cached_tokens == BLOCK


def test_b36_an_answer_is_gone_on_from_and_its_snapshot_holds_exactly_its_tokens(model, engine):
    first = ask(engine, text(30, seed=70))
    consumed = first.prompt_tokens + first.tokens[:-1]
    (snapshot,) = (
        prefix.snapshot for prefix in engine._prefixes._prefixes.values() if prefix.length == len(consumed)
    )
    cache = init_cache(model.config.text, batch=1, capacity=64, dtype=jnp.float32)
    _, cache = prefill(model.graphdef, model.parameters, jnp.array([consumed]), cache)
    layers = [layer for group in cache.groups for layer in group if isinstance(layer, DeltaNetCache)]
    for ours, theirs in zip(jax.tree.leaves(snapshot.delta_nets), jax.tree.leaves(layers), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert snapshot.lengths.tolist() == [len(consumed)]
    second = ask(engine, first.prompt_tokens + first.tokens + text(7, seed=71))
    assert second.cached_tokens == len(consumed)
    check_as_alone(model, second)
    # The next token may be another than the one that was drawn and not consumed.
    other = (*consumed, (first.tokens[-1] + 1) % 60, *text(5, seed=72))
    third = ask(engine, other)
    assert third.cached_tokens == len(consumed)
    check_as_alone(model, third)


def test_b37_an_edited_turn_goes_on_from_before_the_edit(model, engine):
    first = ask(engine, text(BLOCK + 40, seed=90))
    turn = first.prompt_tokens + first.tokens
    sent = ask(engine, turn + text(30, seed=91))
    edited = ask(engine, turn + text(30, seed=91)[:11] + text(25, seed=92))
    again = ask(engine, turn[: BLOCK + 20] + text(9, seed=93))
    for each in (sent, edited, again):
        check_as_alone(model, each)
    assert edited.cached_tokens == len(turn) - 1
    assert again.cached_tokens == BLOCK


def test_a_small_budget_forgets_the_oldest_and_answers_stay_right(model):
    with Engine(model, slots=1, context=4 * BLOCK, prefill_tokens=64, prefix_cache_bytes=150_000) as engine:
        for seed in (1, 2, 3, 1, 2, 3):
            check_as_alone(model, ask(engine, text(BLOCK, seed=200) + text(BLOCK, seed)))
        now = engine.statistics().prefix_cache
        assert now.evicted and 0 < now.held <= now.budget == 150_000
