"""Speculation: the answer is that of plain decoding, token by token, and guesses hold as often as they can."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from qwen35_jax.errors import PromptError
from qwen35_jax.inference.generation import generate
from qwen35_jax.inference.rows import Limits, Rows, fresh_rows, limits_of
from qwen35_jax.inference.sampling import Sampling, draw, stack_settings, truncate
from qwen35_jax.inference.settings import GenerationSettings
from qwen35_jax.inference.speculation import Speculation, _draw_while_guesses_hold
from qwen35_jax.model import abstract_model
from tests.inference.tiny_model import TinyModel
from tests.small_text_model import FULL, LINEAR, small_config
from tests.small_text_model import draw as draw_parameter

VOCABULARY = 97
PROMPTS = [np.random.default_rng(n).integers(0, VOCABULARY, n).tolist() for n in (1, 4, 11, 20)]
GREEDY = GenerationSettings(max_new_tokens=24)
SAMPLED = [
    GenerationSettings(max_new_tokens=24, temperature=0.8, seed=1),
    GenerationSettings(max_new_tokens=17, temperature=1.3, top_p=0.7, seed=2, presence_penalty=0.8),
    GenerationSettings(max_new_tokens=24, temperature=1.0, top_k=9, seed=3, repetition_penalty=1.4),
    GenerationSettings(max_new_tokens=1, temperature=1.0, min_p=0.05, seed=4, min_new_tokens=1),
]


@pytest.fixture(scope="module")
def tiny() -> TinyModel:
    config = small_config((LINEAR, LINEAR, FULL))
    graphdef, abstract = abstract_model(config, parameter_dtype="float32", dtype="float32", mtp=True)
    return TinyModel(config, graphdef, jax.tree_util.tree_map_with_path(draw_parameter, abstract))


def with_guesses_that_hold(tiny: TinyModel) -> TinyModel:
    """The same head over a main model that says every token again and again, which no head can miss.

    All layers add nothing, so that hidden values are embeddings; the head hands on the newest embedding.
    """
    silent = jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            jnp.zeros_like(leaf) if path[-1].key in ("out_weight", "o_weight", "down_weight") else leaf
        ),
        tiny.parameters,
    )
    size = tiny.config.text.hidden_size
    identity = jnp.stack([jnp.eye(size), jnp.zeros((size, size))], axis=1)
    mtp = silent["mtp"] | {"fc_weight": identity, "embedding_norm": {"weight": jnp.zeros(size)}}
    mtp |= {"norm": silent["final_norm"]}
    return dataclasses.replace(tiny, parameters=silent | {"mtp": mtp, "lm_head": silent["embed_tokens"]})


@pytest.mark.parametrize("drafts", [1, 4])
@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_b36_b41_answers_are_those_of_plain_decoding_with_the_same_seeds(tiny, drafts, settings):
    plain = generate(tiny, PROMPTS, settings).generations
    for model in (tiny, with_guesses_that_hold(tiny)):
        expected = plain if model is tiny else generate(model, PROMPTS, settings).generations
        found = generate(model, PROMPTS, settings, speculation=Speculation(drafts)).generations
        assert [row.tokens for row in found] == [row.tokens for row in expected]
        assert [row.finish_reason for row in found] == [row.finish_reason for row in expected]


def test_guesses_that_always_hold_give_a_pass_as_many_tokens_as_there_are_drafts_and_one(tiny):
    sure = with_guesses_that_hold(tiny)
    settings = dataclasses.replace(GREEDY, max_new_tokens=1 + 2 * 10)
    for speculation, passes in ((None, 20), (Speculation(1), 10), (Speculation(4), 4)):
        for row in generate(sure, PROMPTS, settings, speculation=speculation).generations:
            assert row.passes == passes and row.tokens_per_pass == 20 / passes


def test_b90_a_stop_id_among_guesses_that_hold_cuts_the_rest(tiny):
    sure = with_guesses_that_hold(tiny)
    # The penalty makes every token a new one; the head pays it as well, so that its guesses go on holding.
    settings = dataclasses.replace(GREEDY, presence_penalty=50.0)
    stop_id = generate(sure, PROMPTS, settings).generations[2].tokens[7]
    plain, guessed = (
        generate(sure, PROMPTS, settings, stop_ids=[stop_id], speculation=speculation).generations
        for speculation in (None, Speculation(4))
    )
    assert len(guessed[2].tokens) == 8 and guessed[2].passes == 2 and guessed[2].finish_reason == "stop"
    assert [row.tokens for row in guessed] == [row.tokens for row in plain]


@pytest.mark.parametrize("head_input", ["final_norm", "residual"])
def test_b42_either_hidden_value_may_feed_the_head_and_neither_changes_an_answer(tiny, head_input):
    plain = generate(tiny, PROMPTS, GREEDY).generations
    found = generate(tiny, PROMPTS, GREEDY, speculation=Speculation(1, head_input)).generations
    assert [row.tokens for row in found] == [row.tokens for row in plain]


def test_a_model_without_the_head_and_impossible_numbers_of_drafts_are_refused(tiny):
    without = dataclasses.replace(
        tiny, parameters={name: part for name, part in tiny.parameters.items() if name != "mtp"}
    )
    with pytest.raises(PromptError, match="loaded without"):
        generate(without, PROMPTS, GREEDY, speculation=Speculation())
    for drafts in (0, 5, 1.5, True):
        with pytest.raises(PromptError, match="drafts is"):
            Speculation(drafts)


TARGET, GUESS = np.log([0.5, 0.3, 0.2]), np.log([0.8, 0.1, 0.1])
DRAWS = 20_000


def rows_of(count: int, **fields: float) -> tuple[Rows, Sampling, Limits]:
    """Rows that differ in their seeds, over a vocabulary of three; the first token stands in the answer already."""
    settings = [GenerationSettings(**{"temperature": 1.0} | fields)] * count
    rows = fresh_rows([[0]] * count, 3, active=[True] * count)
    rows = rows._replace(step=jnp.full(count, 5), counts=rows.seen.astype(jnp.int32))
    limits = limits_of(settings, [()] * count, vocab_size=3, drawable=3, pad_id=0)
    return rows, stack_settings(settings, range(count)), limits


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 2},
        {"top_p": 0.75},
        {"presence_penalty": 0.6},
        {"frequency_penalty": 0.6},
    ],
)
def test_b41_what_a_pass_emits_has_the_target_distribution_whatever_was_guessed(fields):
    rows, sampling, limits = rows_of(DRAWS, **fields)
    target = jnp.broadcast_to(jnp.float32(TARGET), (DRAWS, 2, 3))
    penalty = jnp.float32([fields.get("presence_penalty", 0.0) + fields.get("frequency_penalty", 0.0), 0, 0])
    # The guess is drawn as the step that it is for will be: same settings, same seed, same step.
    guesses = draw(jnp.broadcast_to(jnp.float32(GUESS) - penalty, (DRAWS, 3)), sampling, rows.step)
    _, consumed, emissions = _draw_while_guesses_hold(target, guesses[:, None], rows, sampling, limits)
    assert emissions.emitted[0].all() and consumed[:, 0].all()
    np.testing.assert_array_equal(consumed[:, 1], emissions.emitted[1])

    one = jax.tree.map(lambda x: x[:1], sampling)
    expected = np.asarray(jax.nn.softmax(truncate(jnp.float32(TARGET)[None] - penalty, one)), float)[0]
    expected /= expected.sum()
    counts = np.bincount(np.asarray(emissions.token[0]), minlength=3)
    possible = expected > 0
    assert not counts[~possible].any()
    assert stats.chisquare(counts[possible], expected[possible] * DRAWS).pvalue > 1e-3
    # The next token is as free as the first: its noise is another step's.
    second = np.asarray(emissions.token[1])[np.asarray(emissions.emitted[1])]
    assert len(second) > 0.3 * DRAWS


def test_b41_guesses_of_another_distribution_hold_nearly_as_often_as_any_scheme_allows():
    rows, sampling, limits = rows_of(DRAWS)
    guesses = draw(jnp.broadcast_to(jnp.float32(GUESS), (DRAWS, 3)), sampling, rows.step)
    target = jnp.broadcast_to(jnp.float32(TARGET), (DRAWS, 2, 3))
    _, consumed, _ = _draw_while_guesses_hold(target, guesses[:, None], rows, sampling, limits)
    p, q = np.exp(TARGET), np.exp(GUESS)
    coupled = sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(3))
    most = np.minimum(p, q).sum()  # 0.70
    assert abs(float(consumed[:, 1].mean()) - coupled) < 0.012
    assert coupled > 0.99 * most
