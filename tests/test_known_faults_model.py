"""Faults reported against other implementations, at the level of the whole model: padding, packing, chunked prefill.

Everything here runs in float64, where a leak cannot hide in rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qwen35_jax.cache import Cache, DeltaNetCache
from qwen35_jax.model import prefill
from tests.small_text_model import (
    FULL,
    LINEAR,
    PAD_IDS,
    ROWS,
    TIME,
    SmallModel,
    arrange,
    difference,
    document,
    logits_and_gradient,
    small_model,
    tree_difference,
)

BOUND = 1e-12
NINE, SIXTEEN = document(9, 9), document(16, 16)
SHORT_AND_LONG = (5, 1, 2, 8, 19)  # shorter than the convolution, and across its edges


@pytest.fixture
def model() -> Iterator[SmallModel]:
    with jax.enable_x64(True):
        yield small_model("float64")


def weights_of(document: np.ndarray) -> np.ndarray:
    """What the logits of a document count in the loss whose gradient is taken, wherever the document lies."""
    return np.random.default_rng(len(document)).standard_normal((len(document), 97))


def run(model: SmallModel, rows: Sequence, counted: Sequence[np.ndarray] = ()) -> tuple[list, dict]:
    """Logits of every document of arranged rows, in order, and the gradient of the loss over the `counted`."""
    tokens, segment_ids = arrange(rows)
    weights = np.zeros((ROWS, TIME, 97))
    places = []
    for row in range(ROWS):
        for number in range(1, segment_ids[row].max() + 1):
            places.append((row, segment_ids[row] == number))
            text = tokens[places[-1]]
            if any(np.array_equal(text, one) for one in counted):
                weights[places[-1]] = weights_of(text)
    logits, gradient = logits_and_gradient(model.graphdef, model.parameters, tokens, segment_ids, weights)
    return [np.asarray(logits)[place] for place in places], gradient


def run_nine_unpadded(model: SmallModel) -> tuple[np.ndarray, dict]:
    """One row of 9 tokens: no padding, no segment ids, all inner values kept for the backward pass."""
    logits, gradient = logits_and_gradient(
        model.graphdef, model.parameters, NINE[None], None, weights_of(NINE)[None], rematerialize="none"
    )
    return np.asarray(logits)[0], gradient


@pytest.mark.parametrize("before", [0, 7, TIME - 9])
def test_b01_padding_changes_no_logit_and_no_gradient_nor_does_recomputing(model, before):
    expected, expected_gradient = run_nine_unpadded(model)
    logits, gradient = run(model, [[SIXTEEN], [before, NINE], [3, SIXTEEN, 4]], [NINE])
    assert difference(logits[1], expected) <= BOUND
    assert tree_difference(gradient, expected_gradient) <= BOUND
    assert not np.any(gradient["embed_tokens"]["weight"][PAD_IDS.start :])


def test_b01_not_even_nan_in_padding_reaches_a_real_token(model):
    rows = [[7, NINE, 2, SIXTEEN], [SIXTEEN], [26, SIXTEEN]]
    clean, _ = run(model, rows)
    embedding = model.parameters["embed_tokens"]["weight"].at[PAD_IDS.start :].set(jnp.nan)
    poisoned, _ = run(with_embedding(model, embedding), rows)
    for ours, expected in zip(poisoned, clean, strict=True):
        assert np.array_equal(ours, expected)


def with_embedding(model: SmallModel, embedding: jax.Array) -> SmallModel:
    return dataclasses.replace(model, parameters=model.parameters | {"embed_tokens": {"weight": embedding}})


def test_b07_rows_that_are_all_padding_change_no_logit_and_no_gradient(model):
    expected, expected_gradient = run_nine_unpadded(model)
    (logits,), gradient = run(model, [[], [5, NINE], []], [NINE])
    assert difference(logits, expected) <= BOUND
    assert tree_difference(gradient, expected_gradient) <= BOUND


def test_b07_nan_in_a_real_token_surfaces_there_and_in_no_other_row(model):
    once = next(token for token in NINE[5:] if token not in NINE[:5] and token not in SIXTEEN)
    at = NINE.tolist().index(once)
    embedding = model.parameters["embed_tokens"]["weight"].at[once].set(jnp.nan)
    sixteen, nine = run(with_embedding(model, embedding), [[SIXTEEN], [NINE], []])[0]
    assert np.isnan(nine[at:]).all()
    assert np.isfinite(sixteen).all()


def consume(model: SmallModel, chunks: Sequence[Sequence[np.ndarray]]) -> tuple[np.ndarray, Cache]:
    """Prefill of the chunks, one per row and call, padded on the right. Logits after each row's last token."""
    cache, last = model.new_cache(), np.zeros((ROWS, 97))
    for chunk in chunks:
        logits, cache = model.prefill([[piece] for piece in chunk], cache)
        consumed = np.array([len(piece) > 0 for piece in chunk])
        last = np.where(consumed[:, None], logits, last)
    return last, cache


def greedy(model: SmallModel, logits: np.ndarray, cache: Cache, steps: int) -> np.ndarray:
    chosen, cache = [logits.argmax(axis=-1)], jax.tree.map(jnp.copy, cache)  # a step takes its cache
    for _ in range(steps):
        logits, cache = model.step(chosen[-1], cache)
        chosen.append(logits.argmax(axis=-1))
    return np.stack(chosen, axis=1)


def memory_of_row(cache: Cache, row: int):
    return jax.tree.map(lambda leaf: leaf[:, row], cache.groups)


def test_b03_prompts_of_three_lengths_in_chunks_leave_what_each_leaves_alone(model):
    prompts = [document(seed, length) for seed, length in ((31, 5), (32, 12), (33, 17))]
    chunks = [[prompt[start : start + 8] for prompt in prompts] for start in range(0, 17, 8)]
    logits, cache = consume(model, chunks)
    tokens = None
    for row, prompt in enumerate(prompts):
        slot = (row + 1) % ROWS
        rows = [document(40 + at, 3) for at in range(ROWS)]
        rows[slot] = prompt
        logits_alone, cache_alone = consume(model, [rows])
        assert difference(logits[row], logits_alone[slot]) <= BOUND
        assert tree_difference(memory_of_row(cache, row), memory_of_row(cache_alone, slot)) <= BOUND
        tokens_alone = greedy(model, logits_alone, cache_alone, 7)[slot]
        if tokens is None:
            tokens = greedy(model, logits, cache, 7)
        assert tokens[row].tolist() == tokens_alone.tolist()


def test_b04_a_row_gives_the_same_beside_rows_of_1_3_and_10_times_its_length(model):
    own, fed = document(4, 4), document(5, 8)
    answers = []
    for length in (4, 12, 40):
        others = [document(6, length), document(7, length)]
        logits, cache = consume(model, [[own, *others]])
        answers.append([logits[0]])
        for token in fed:
            logits, cache = model.step([token, 3, 5], cache)
            answers[-1].append(logits[0])
    assert difference(answers[1], answers[0]) <= BOUND
    assert difference(answers[2], answers[0]) <= BOUND


def test_b06_a_single_row_padded_on_the_left_answers_as_the_unpadded_one(model):
    expected, _ = run_nine_unpadded(model)
    tokens = np.concatenate([np.arange(60, 67), NINE]).astype(np.int32)[None]
    logits, cache = prefill(
        model.graphdef,
        model.parameters,
        tokens,
        model.new_cache(rows=1),
        segment_ids=np.repeat([0, 1], [7, 9]).astype(np.int32)[None],
    )
    assert difference(logits[0], expected[-1]) <= BOUND
    assert cache.lengths.tolist() == [9]


def assert_packed_equals_separate(model: SmallModel) -> None:
    documents = [document(seed, length) for seed, length in enumerate(SHORT_AND_LONG, start=50)]
    packed, gradient = run(model, [documents, [], [2, NINE]], documents)
    first, first_gradient = run(model, [[one] for one in documents[:3]], documents)
    second, second_gradient = run(model, [[1, documents[3]], [documents[4]], []], documents)
    for ours, alone in zip(packed, [*first, *second], strict=False):
        assert difference(ours, alone) <= BOUND
    separate = jax.tree.map(jnp.add, first_gradient, second_gradient)
    assert tree_difference(gradient, separate) <= BOUND

    changed = [(documents[0] + 7) % 60, *documents[1:]]
    again, _ = run(model, [changed, [], [2, NINE]])
    assert not np.array_equal(again[0], packed[0])
    for ours, before in zip(again[1:], packed[1:], strict=True):
        assert np.array_equal(ours, before)


def test_b08_packed_documents_equal_separate_runs_with_their_gradients(model):
    assert_packed_equals_separate(model)


@pytest.mark.parametrize("kind", [LINEAR, FULL])
def test_b09_b95_layers_of_one_kind_keep_documents_apart_and_are_finite_at_every_length(kind):
    with jax.enable_x64(True):
        model = small_model("float64", (kind,) * 2)
        assert_packed_equals_separate(model)
        for length in range(1, TIME + 1, ROWS):
            documents = [document(length + row, length + row) for row in range(ROWS)]
            logits, gradient = run(model, [[one] for one in documents], documents)
            assert all(np.isfinite(one).all() for one in logits)
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_b10_positions_restart_with_each_document_and_go_on_from_the_cache(model):
    text = nnx.merge(model.graphdef, model.parameters)
    ids = np.array([[1, 1, 1, 2, 2, 2, 2, 0]], np.int32)
    tokens = np.zeros_like(ids)

    def phases(positions, segment_ids=ids, cache=None):
        context = text.context(tokens, positions, segment_ids, cache)
        return np.stack([context.rotary_cos[0], context.rotary_sin[0]], axis=1)

    counted = phases(None)
    given = phases(np.array([[0, 1, 2, 0, 1, 2, 3, 0]]))
    assert np.array_equal(counted[:7], given[:7])
    later = model.new_cache(rows=1)
    later = dataclasses.replace(later, lengths=later.lengths + 20)
    assert np.array_equal(phases(None, cache=later)[:7], phases(np.array([[20, 21, 22, 0, 1, 2, 3, 0]]))[:7])
    # An image in the second document: its three axes are those of the document alone.
    image = np.array([[[9, 9, 9, 0, 1, 1, 1, 0]], [[9, 9, 9, 0, 1, 1, 2, 0]], [[9, 9, 9, 0, 1, 2, 1, 0]]])
    alone = np.roll(image, -3, axis=-1)
    assert np.array_equal(phases(image)[3:7], phases(alone, np.roll(ids, -3, axis=-1))[:4])
    assert len(np.unique(phases(image)[4:7], axis=0)) == 3


def test_b18_a_prompt_cut_anywhere_gives_what_it_gives_in_one_piece(model):
    text = document(18, TIME)
    whole, cache_whole = consume(model, [[text] * ROWS])
    for cuts in ((1, 2, 3), (15, 16, 17), (33, TIME - 1, 20)):
        heads = [text[:cut] for cut in cuts]
        tails = [text[cut:] for cut in cuts]
        logits, cache = consume(model, [heads, tails])
        assert difference(logits, whole) <= BOUND
        assert tree_difference(cache, cache_whole) <= BOUND

    # The decay is weak enough for this to be a test of the state and of the window: without them it fails.
    for lost in ("state", "window_k"):
        _, cache = consume(model, [[text[:20]] * ROWS])
        forgetful = jax.tree.map(
            lambda layer, lost=lost: (
                dataclasses.replace(layer, **{lost: jnp.zeros_like(getattr(layer, lost))})
                if isinstance(layer, DeltaNetCache)
                else layer
            ),
            cache,
            is_leaf=lambda node: isinstance(node, DeltaNetCache),
        )
        logits, _ = model.prefill([[text[20:]]] * ROWS, forgetful)
        assert difference(logits, whole) > 1e-3
