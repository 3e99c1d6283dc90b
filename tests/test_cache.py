"""The decoding state: its shapes and dtypes, what it counts, what it refuses, and that frozen rows stay as they are."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.cache import AttentionCache, Cache, init_cache
from qwen35_jax.errors import CapacityError, ConfigError, PromptError
from qwen35_jax.model import decode_step, prefill
from qwen35_jax.ops.moving import from_storage, storage_dtype
from tests.small_text_model import (
    CAPACITY,
    FULL,
    LINEAR,
    ROWS,
    SmallModel,
    arrange,
    difference,
    document,
    small_config,
    small_model,
)


@pytest.fixture
def model() -> SmallModel:
    return small_model("float32")


@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [("bfloat16", "float32"), ("float16", "float32"), ("float32", "float32"), ("float64", "float64")],
)
def test_b23_a_new_cache_holds_states_in_float32_or_wider_and_the_rest_in_the_compute_dtype(
    dtype, state_dtype
):
    config = small_config((LINEAR, LINEAR, FULL) * 5).text
    with jax.enable_x64(dtype == "float64"):
        cache = init_cache(config, batch=7, capacity=11, dtype=dtype)
    ((first, second, attention),) = cache.groups
    for layer in (first, second):
        assert (layer.state.shape, layer.state.dtype) == ((5, 7, 4, 16, 12), state_dtype)
        assert (layer.window_q.shape, layer.window_q.dtype) == ((5, 7, 3, 2, 16), dtype)
        assert (layer.window_k.shape, layer.window_k.dtype) == ((5, 7, 3, 2, 16), dtype)
        assert (layer.window_v.shape, layer.window_v.dtype) == ((5, 7, 3, 4, 12), dtype)
    for kept in (attention.key, attention.value):
        assert (kept.shape, kept.dtype) == ((5, 7, 11, 2, 32), storage_dtype(dtype))
        assert from_storage(kept).dtype == dtype
    assert cache.lengths.tolist() == [0] * 7
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(cache))


def test_a_cache_is_a_pytree_whose_capacity_is_no_array(model):
    cache = model.new_cache()
    leaves, structure = jax.tree.flatten(cache)
    assert len(leaves) == 4 + 2 + 1
    assert jax.tree.unflatten(structure, leaves).capacity == CAPACITY
    assert jax.tree.structure(model.new_cache(capacity=CAPACITY + 1)) != structure


def test_b05_lengths_count_the_real_tokens_that_each_row_consumed(model):
    texts = [document(row, length) for row, length in enumerate((1, 9, 30))]
    _, cache = model.prefill([[4, texts[0]], [texts[1], 8], [12, texts[2]]], model.new_cache())
    assert cache.lengths.tolist() == [1, 9, 30]
    for _ in range(3):
        _, cache = model.step([1, 2, 3], cache)
    _, cache = model.step([1, 2, 3], cache, [False, True, False])
    assert cache.lengths.tolist() == [4, 13, 33]
    _, cache = model.prefill([[texts[1]], [], [3, texts[0]]], cache)
    assert cache.lengths.tolist() == [13, 13, 34]
    # A slot per consumed token, in every attention layer; the rest was never written.
    for layer in (layer for group in cache.groups for layer in group if isinstance(layer, AttentionCache)):
        for leaf in (layer.key, layer.value):
            written = np.any(np.asarray(leaf), axis=(-2, -1))
            assert np.array_equal(
                written, np.broadcast_to(np.arange(CAPACITY) < cache.lengths[:, None], written.shape)
            )


def test_b05_rows_admitted_late_give_what_they_give_alone(model):
    prompts, arrivals = [document(row, 5 + 3 * row) for row in range(ROWS)], (0, 3, 7)

    def answers(rows: tuple[int, ...]) -> dict[int, list[np.ndarray]]:
        """Logits of up to 6 greedy steps of each of these rows, which arrive as they do."""
        cache, given = model.new_cache(), {row: [] for row in rows}
        for time in range(13):
            arriving = [row for row in rows if arrivals[row] == time]
            if arriving:
                logits, cache = model.prefill(
                    [[prompts[row]] if row in arriving else [] for row in range(ROWS)], cache
                )
                for row in arriving:
                    given[row].append(logits[row])
            running = [row for row in rows if 0 < len(given[row]) < 6 and row not in arriving]
            if running:
                chosen = [int(given[row][-1].argmax()) if row in running else 0 for row in range(ROWS)]
                logits, cache = model.step(chosen, cache, [row in running for row in range(ROWS)])
                for row in running:
                    given[row].append(logits[row])
        return given

    together = answers((0, 1, 2))
    for row in range(ROWS):
        alone = answers((row,))[row]
        assert len(alone) == 6
        assert difference(np.stack(together[row]), np.stack(alone)) <= 1e-5


@pytest.mark.parametrize("frozen", [0, 1, ROWS - 1])
def test_b05_frozen_rows_keep_every_array_bit_for_bit(model, frozen):
    _, cache = model.prefill([[document(row, 6 + row)] for row in range(ROWS)], model.new_cache())
    before = jax.tree.map(np.array, cache)
    active = [row != frozen for row in range(ROWS)]
    for token in (1, 2, 3):
        _, cache = model.step([token] * ROWS, cache, active)
    _, cache = model.prefill([[document(9, 4)] if on else [] for on in active], cache)
    for old, new in zip(before.groups[0], cache.groups[0], strict=True):
        for name in (field.name for field in dataclasses.fields(old)):
            was, now = getattr(old, name), np.asarray(getattr(new, name))
            assert was[:, frozen].tobytes() == now[:, frozen].tobytes()
            for row in range(ROWS):
                assert row == frozen or not np.array_equal(was[:, row], now[:, row])
    assert cache.lengths[frozen] == 6 + frozen


def test_what_a_frozen_row_is_fed_changes_no_other_row(model):
    texts = [[document(row, 5)] for row in range(ROWS)]
    answers = []
    for ignored in (2, 55):
        _, cache = model.prefill(texts, model.new_cache())
        logits, _ = model.step([7, ignored, 9], cache, [True, False, True])
        answers.append(logits[[0, 2]])
    assert np.array_equal(*answers)


def test_slots_not_yet_filled_are_never_read(model):
    text = document(1, 10)
    _, cache = model.prefill([[text]] * ROWS, model.new_cache())

    def spoil(layer):
        if not isinstance(layer, AttentionCache):
            return layer
        return AttentionCache(layer.key.at[:, :, 10:].set(jnp.nan), layer.value.at[:, :, 10:].set(jnp.nan))

    spoiled = jax.tree.map(
        spoil,
        jax.tree.map(jnp.copy, cache),  # a step takes the arrays that it is given
        is_leaf=lambda node: isinstance(node, AttentionCache),
    )
    expected, _ = model.step([4, 5, 6], cache)
    logits, _ = model.step([4, 5, 6], spoiled)
    assert np.array_equal(logits, expected)


def test_b73_the_last_slot_is_used_and_one_more_is_refused_before_anything_runs(model):
    def texts(length: int) -> list:
        return [[document(0, 3)], [document(1, length)], []]

    _, cache = model.prefill(texts(40), model.new_cache())
    before = jax.tree.map(np.array, cache)
    with pytest.raises(CapacityError, match=r"row 1 would hold 49 tokens, but the capacity is 48"):
        model.prefill(texts(9), cache)
    # The refused call has neither taken nor changed the cache.
    jax.tree.map(np.testing.assert_array_equal, cache, before)
    full, cache = model.prefill(texts(8), cache)
    assert cache.lengths.tolist() == [6, CAPACITY, 0]
    with pytest.raises(CapacityError, match="capacity is 48"):
        model.step([1, 1, 1], cache)
    # A full row may stand by while the others go on.
    _, cache = model.step([1, 1, 1], cache, [True, False, True])
    assert cache.lengths.tolist() == [7, CAPACITY, 1]
    # What the last slot's token answers is what it answers in a model with room to spare.
    _, roomy = model.prefill(texts(40), model.new_cache(capacity=CAPACITY + 16))
    expected, _ = model.prefill(texts(8), roomy)
    assert difference(full[1], expected[1]) <= 1e-5


@pytest.mark.parametrize("wrong", ["bfloat16", "transposed"])
def test_b24_a_state_of_another_dtype_or_layout_is_refused(model, wrong):
    def change(layer):
        if isinstance(layer, AttentionCache):
            return layer
        state = layer.state.astype(wrong) if wrong == "bfloat16" else layer.state.swapaxes(-1, -2)
        return dataclasses.replace(layer, state=state)

    cache = model.new_cache()
    groups = tuple(tuple(map(change, group)) for group in cache.groups)
    with pytest.raises(ValueError, match="initial_state"):
        model.step([1, 2, 3], dataclasses.replace(cache, groups=groups))


def test_b24_a_float64_cache_in_a_float32_model_is_refused(model):
    with jax.enable_x64(True):
        cache = init_cache(model.config.text, batch=ROWS, capacity=CAPACITY, dtype="float64")
        with pytest.raises(ValueError, match=r"initial_state is float64; expected float32"):
            model.step([1, 2, 3], cache)


def test_a_call_takes_the_memory_of_the_cache_that_it_is_given(model):
    old = model.new_cache()
    tokens, segment_ids = arrange([[document(0, 3)]] * ROWS)
    _, cache = prefill(model.graphdef, model.parameters, tokens, old, segment_ids=segment_ids)
    _, newer = model.step([1, 2, 3], cache)
    assert all(leaf.is_deleted() for given in (old, cache) for leaf in jax.tree.leaves(given.groups))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(newer))
    assert isinstance(newer, Cache)


def test_two_documents_in_a_row_of_a_cache_are_refused_before_the_call(model):
    cache = model.new_cache()
    segment_ids = jnp.ones((ROWS, 4), jnp.int32).at[1, 2:].set(5).at[0, 3].set(0)
    tokens = jnp.ones((ROWS, 4), jnp.int32)
    with pytest.raises(PromptError, match=r"row 1 holds documents \[1, 5\]"):
        prefill(model.graphdef, model.parameters, tokens, cache, segment_ids=segment_ids)
    assert not cache.lengths.is_deleted()


def test_padding_inside_a_document_of_a_cache_is_refused_before_the_call(model):
    segment_ids = jnp.array([[1, 1, 1, 0], [0, 1, 1, 0], [1, 0, 1, 1]])
    with pytest.raises(PromptError, match="row 2 has padding between its tokens"):
        prefill(
            model.graphdef,
            model.parameters,
            jnp.ones((3, 4), jnp.int32),
            model.new_cache(),
            segment_ids=segment_ids,
        )


@pytest.mark.parametrize(
    ("tokens", "segment_ids", "complaint"),
    [
        ([[1, 2]] * 3, None, "tokens are a list"),
        (jnp.ones(4, jnp.int32), None, r"shape \(4,\), expected \(3, time\)"),
        (jnp.ones((2, 4), jnp.int32), None, r"shape \(2, 4\), expected \(3, time\)"),
        (jnp.ones((3, 0), jnp.int32), None, "at least one token"),
        (jnp.ones((3, 4)), None, "tokens are float32"),
        (jnp.ones((3, 4), jnp.int32), jnp.ones((3, 5), jnp.int32), r"segment_ids have shape \(3, 5\)"),
    ],
)
def test_tokens_of_a_wrong_shape_or_type_are_refused_before_the_call(model, tokens, segment_ids, complaint):
    cache = model.new_cache()
    with pytest.raises(PromptError, match=complaint):
        prefill(model.graphdef, model.parameters, tokens, cache, segment_ids=segment_ids)
    assert not cache.lengths.is_deleted()


def test_a_decoding_step_takes_one_token_per_row(model):
    for tokens in (jnp.ones((3, 1), jnp.int32), jnp.ones(2, jnp.int32), jnp.ones(3)):
        with pytest.raises(PromptError, match="tokens"):
            decode_step(model.graphdef, model.parameters, tokens, model.new_cache())


def test_a_cache_is_made_from_the_text_config_and_whole_numbers(model):
    with pytest.raises(ConfigError, match=r"config\.text"):
        init_cache(model.config, batch=1, capacity=8, dtype="float32")
    with pytest.raises(CapacityError, match=r"capacity: 8\.0"):
        init_cache(model.config.text, batch=1, capacity=8.0, dtype="float32")
