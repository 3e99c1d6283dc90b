from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35_jax.inference.sampling import Sampling, draw, most_likely, penalize, stack_settings, truncate
from qwen35_jax.inference.settings import GenerationSettings

VOCABULARY = 53
truncated = jax.jit(truncate)
drawn = jax.jit(draw)


def sampling(rows: list[GenerationSettings], seeds: Sequence[int] | None = None) -> Sampling:
    return stack_settings(rows, seeds or [row.seed or 0 for row in rows])


def kept_by_sorting(logits: np.ndarray, row: GenerationSettings) -> np.ndarray:
    """Which tokens may be drawn, by the textbook: sort, cut, renormalise, cut again. No ties in `logits`."""
    order = np.argsort(-logits)
    scaled = logits[order].astype(np.float64) / max(row.temperature, 1e-5)
    probabilities = np.exp(scaled - scaled[0])
    if row.top_k:
        probabilities[row.top_k :] = 0
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities) - probabilities
    probabilities[before >= row.top_p] = 0
    keep = (probabilities > 0) & (probabilities >= row.min_p * probabilities[0])
    mask = np.zeros(len(logits), bool)
    mask[order[keep]] = True
    return mask


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    temperature=st.floats(0.3, 2),
    top_k=st.integers(0, VOCABULARY + 5),
    top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 1),
)
def test_the_tokens_that_remain_are_those_of_the_sorted_definition(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.random.default_rng(seed).normal(size=(1, VOCABULARY)).astype(np.float32) * 3
    row = GenerationSettings(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = np.isfinite(truncated(logits, sampling([row])))[0]
    expected = kept_by_sorting(logits[0], row)
    # Where a cumulated probability hits a limit to the last bit of float32, either side is right.
    differing = np.flatnonzero(kept != expected)
    assert len(differing) <= 1
    if len(differing):
        nudged = [
            kept_by_sorting(
                logits[0],
                GenerationSettings(
                    temperature=temperature,
                    top_k=top_k,
                    top_p=min(1.0, top_p * (1 + sign * 1e-5)),
                    min_p=min(1.0, min_p * (1 + sign * 1e-5)),
                ),
            )
            for sign in (-1, 1)
        ]
        assert any((kept == mask).all() for mask in nudged)


def test_rows_have_their_own_settings() -> None:
    logits = np.random.default_rng(0).normal(size=(4, VOCABULARY)).astype(np.float32)
    rows = [
        GenerationSettings(temperature=1.0, top_k=3),
        GenerationSettings(temperature=0.5, top_p=0.4),
        GenerationSettings(temperature=2.0, min_p=0.6),
        GenerationSettings(temperature=1.0),
    ]
    kept = np.isfinite(truncated(logits, sampling(rows)))
    for index, row in enumerate(rows):
        np.testing.assert_array_equal(kept[index], kept_by_sorting(logits[index], row))
    assert kept[0].sum() == 3
    assert kept[3].all()


def test_ties_with_the_last_kept_token_are_kept() -> None:
    logits = jnp.array([[1.0, 2.0, 1.0, 3.0, -1.0]])
    kept = np.isfinite(truncate(logits, sampling([GenerationSettings(temperature=1.0, top_k=3)])))
    assert kept.tolist() == [[True, True, True, True, False]]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_greedy_is_the_exact_argmax_and_takes_the_lowest_id_among_equals(dtype: jnp.dtype) -> None:
    logits = jnp.array([[0.5, 2.0, 2.0, -1.0], [3.0, -3.0, 0.0, 3.0]], dtype)
    rows = sampling([GenerationSettings()] * 2)
    assert drawn(logits, rows, jnp.zeros(2, jnp.int32)).tolist() == [1, 0]


def test_greedy_tells_float64_logits_apart(x64: None) -> None:
    logits = jnp.array([[1.0, 1.0 + 1e-12, 1.0]])
    assert draw(logits, sampling([GenerationSettings()]), jnp.zeros(1, jnp.int32)).tolist() == [1]


def test_greedy_and_random_rows_share_a_batch() -> None:
    logits = jnp.zeros((2, VOCABULARY)).at[:, 7].set(1.0)
    rows = sampling([GenerationSettings(), GenerationSettings(temperature=1.0)], [5, 5])
    tokens = np.array([drawn(logits, rows, jnp.full(2, step)) for step in range(20)])
    assert (tokens[:, 0] == 7).all()
    assert len(set(tokens[:, 1])) > 5


def test_small_temperatures_are_greedy_and_never_nan() -> None:
    logits = jnp.array([[-300.0, 200.0, 199.0, 0.0]])
    for temperature in (1e-30, 1e-6, 1e-4, 1e-3):
        row = sampling([GenerationSettings(temperature=temperature, top_p=0.9, top_k=3)])
        assert not np.isnan(truncated(logits, row)).any()
        assert drawn(logits, row, jnp.zeros(1, jnp.int32)).tolist() == [1]


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = jnp.zeros((1, VOCABULARY)).at[:, ::2].set(-jnp.inf)
    row = sampling([GenerationSettings(temperature=100.0)])
    tokens = {int(drawn(logits, row, jnp.full(1, step))[0]) for step in range(100)}
    assert all(token % 2 for token in tokens)


def test_draws_follow_the_probabilities() -> None:
    """4,000 rows, one seed each, over one distribution: every count within 4.5 standard deviations."""
    logits = np.random.default_rng(1).normal(size=6).astype(np.float32) * 1.5
    temperature, count = 0.8, 4000
    rows = sampling([GenerationSettings(temperature=temperature)] * count, list(range(count)))
    tokens = drawn(jnp.broadcast_to(jnp.asarray(logits), (count, 6)), rows, jnp.zeros(count, jnp.int32))
    probabilities = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    spread = np.sqrt(count * probabilities * (1 - probabilities))
    deviation = (np.bincount(tokens, minlength=6) - count * probabilities) / spread
    assert np.abs(deviation).max() < 4.5


def test_b04_a_rows_draws_depend_on_its_seed_and_step_alone() -> None:
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(3, VOCABULARY)).astype(np.float32))
    rows = sampling([GenerationSettings(temperature=1.0)] * 3, [11, 12, 13])
    together = [drawn(logits, rows, jnp.array([step, 2 * step, 5])) for step in range(8)]
    alone = sampling([GenerationSettings(temperature=1.0)], [12])
    for step in range(8):
        assert together[step][1] == drawn(logits[1:2], alone, jnp.array([2 * step]))[0]
    assert len({int(tokens[2]) for tokens in together}) == 1  # its step stood still
    assert len({int(tokens[1]) for tokens in together}) > 2


def test_draws_are_the_same_with_64_bit_types_on() -> None:
    logits = np.random.default_rng(3).normal(size=(1, VOCABULARY)).astype(np.float32)
    row = GenerationSettings(temperature=1.0)

    def tokens() -> list[int]:
        rows = sampling([row] * 6, range(6))
        return jax.jit(draw)(jnp.repeat(logits, 6, axis=0), rows, jnp.arange(6)).tolist()

    narrow = tokens()
    with jax.enable_x64(True):
        assert tokens() == narrow


def test_penalties_change_the_tokens_they_are_for() -> None:
    logits = jnp.array([[2.0, -2.0, 2.0, -2.0, 1.0]])
    seen = jnp.array([[True, True, False, False, True]])
    counts = jnp.array([[0, 0, 0, 1, 3]])
    row = GenerationSettings(repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    result = penalize(logits, sampling([row]), seen=seen, counts=counts)
    assert result.tolist() == [[1.0, -4.0, 2.0, -2.75, 0.5 - 0.25 - 1.5]]
    unchanged = penalize(logits, sampling([GenerationSettings()]), seen=seen, counts=counts)
    assert unchanged.tolist() == logits.tolist()


def test_nothing_sorts_the_vocabulary() -> None:
    row = sampling([GenerationSettings(temperature=1.0)])
    program = str(jax.make_jaxpr(draw)(jnp.zeros((1, VOCABULARY)), row, jnp.zeros(1, jnp.int32)))
    assert "sort" not in program
    assert "top_k" not in program


def test_most_likely_is_the_lowest_of_equals_and_a_token_of_the_vocabulary_whatever_the_logits() -> None:
    logits = np.array([[0.5, 2.0, -1.0, 2.0, 0.0], [3.0, -np.inf, 3.0, 1.0, 3.0], [-np.inf] * 5], np.float32)
    np.testing.assert_array_equal(most_likely(jnp.asarray(logits)), np.argmax(logits, axis=-1))
    assert 0 <= int(most_likely(jnp.array([1.0, jnp.nan, 2.0]))) < 3
