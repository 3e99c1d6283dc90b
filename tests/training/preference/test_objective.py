"""The loss of pairs is its formula, and the same however they are packed and a step is split."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qwen35_jax.errors import ConfigError
from qwen35_jax.model import abstract_model
from qwen35_jax.training.batches import single_pass
from qwen35_jax.training.document import Document
from qwen35_jax.training.lora import LoRA, init_adapter
from qwen35_jax.training.preference.dataset import Pair
from qwen35_jax.training.preference.evaluation import evaluate_preferences
from qwen35_jax.training.preference.objective import Preference, PreferenceBatch
from qwen35_jax.training.preference.reference import reference_log_probabilities
from qwen35_jax.training.preference.rows import ReferencedRows, pack_pairs
from qwen35_jax.training.train_step import init_train_state, train_step
from tests.small_text_model import FULL, LINEAR, draw, logits_of, small_config, tree_difference

PREFERENCE = Preference(beta=0.3, label_smoothing=0.2, chosen_weight=0.7, rematerialize="none")
# Of chosen and rejected document, and of the prompt that both begin with. Three pairs fill a row of 22.
LENGTHS = (((5, 7), 3), ((3, 2), 1), ((12, 9), 6), ((3, 3), 2), ((2, 2), 1))
OPTIMIZER = optax.sgd(0.1)  # a plain step shows the gradients
CONFIG = small_config((LINEAR, FULL))


@functools.cache
def small_model():
    return abstract_model(CONFIG, parameter_dtype="float64", dtype="float64")


def parameters():
    """New arrays each time: a step takes those that it is given."""
    return jax.tree_util.tree_map_with_path(draw, small_model()[1])


def pairs() -> list[Pair]:
    rng = np.random.default_rng(2)
    found = []
    for lengths, known in LENGTHS:
        prompt = rng.integers(0, 97, known)
        answers = [np.concatenate([prompt, rng.integers(0, 97, length - known)]) for length in lengths]
        found.append(
            Pair(*(Document(tokens.astype(np.int32), np.arange(len(tokens)) >= known) for tokens in answers))
        )
    return found


def reference() -> np.ndarray:
    return -np.random.default_rng(3).uniform(5, 30, 2 * len(LENGTHS))


def referenced(row_length: int = 22) -> ReferencedRows:
    return ReferencedRows(pack_pairs(pairs(), row_length), reference())


def one_pair_a_row() -> ReferencedRows:
    """The same pairs, each in a row of its own."""
    packed = referenced().packed
    alone = dataclasses.replace(packed)
    object.__setattr__(alone, "rows", [[2 * pair, 2 * pair + 1] for pair in range(len(LENGTHS))])
    return ReferencedRows(alone, reference())


def batch(rows: ReferencedRows, micro_batches: int) -> PreferenceBatch:
    """All rows, and rows of padding to fill up."""
    each = -(-len(rows) // micro_batches)
    (found,) = single_pass(rows, micro_batches=micro_batches, rows=each)
    return jax.tree.map(
        lambda array: jnp.asarray(array, "float64" if array.dtype.kind == "f" else "int32"), found
    )


def stepped(of: PreferenceBatch):
    state, told = train_step(
        small_model()[0], OPTIMIZER, PREFERENCE, init_train_state(parameters(), OPTIMIZER), of
    )
    return state.parameters, told


@functools.cache
def log_probabilities() -> tuple[np.ndarray, np.ndarray]:
    """Of each answer, from all logits of its document alone, and its tokens."""
    found, counts = [], []
    for document in (one for pair in pairs() for one in pair):
        tokens = document.tokens[None]
        # Filled up to one shape, for one program.
        row, ids = (np.pad(x, ((0, 0), (0, 12 - tokens.size))) for x in (tokens, np.ones_like(tokens)))
        logits = logits_of(small_model()[0], parameters(), row, ids)[0]
        each = np.asarray(jax.nn.log_softmax(logits, axis=-1))[np.arange(tokens.size - 1), tokens[0, 1:]]
        found.append(each[document.trained[1:]].sum())
        counts.append(document.trained.sum())
    return np.array(found).reshape(-1, 2), np.array(counts).reshape(-1, 2)


@pytest.mark.usefixtures("x64", "compiled_quickly")
def test_b82_loss_measures_and_update_are_the_formula_and_the_same_however_packed_and_split():
    assert len(referenced()) == 3
    known, tokens = log_probabilities()
    rewards = PREFERENCE.beta * (known - reference().reshape(-1, 2))
    margin = rewards[:, 0] - rewards[:, 1]
    assert 0 < (margin > 0).sum() < len(margin)

    def minus_log_sigmoid(x):
        return np.log1p(np.exp(-x))

    loss = 0.8 * minus_log_sigmoid(margin) + 0.2 * minus_log_sigmoid(-margin)
    loss -= 0.7 * known[:, 0] / tokens[:, 0]
    expected = (loss, margin > 0, margin, *rewards.T, *known.T)

    whole, told = stepped(batch(referenced(), 1))
    assert float(told.totals.pairs) == len(LENGTHS)
    for value, of_pairs in zip(told.measures, expected, strict=True):
        np.testing.assert_allclose(value, of_pairs.mean(), rtol=1e-12)
    parts, told_in_parts = stepped(batch(one_pair_a_row(), 3))  # and a row of padding
    assert tree_difference(parts, whole) <= 1e-12
    assert tree_difference(told_in_parts._replace(finite=0), told._replace(finite=0)) <= 1e-12


@pytest.mark.usefixtures("x64", "compiled_quickly")
def test_against_itself_a_model_has_no_margin_and_an_adapter_then_learns_to_tell_answers_apart():
    graphdef, _ = small_model()
    base, lora = parameters(), LoRA(rank=3)
    packed = pack_pairs(pairs(), 22)
    batches = (jax.tree.map(jnp.asarray, rows) for rows in single_pass(packed, micro_batches=1, rows=2))
    found = reference_log_probabilities(graphdef, base, packed, batches)
    np.testing.assert_allclose(found.reshape(-1, 2), log_probabilities()[0], rtol=1e-12)
    rows = ReferencedRows(packed, found)
    optimizer, preference = optax.adam(1e-2), Preference()
    adapter = init_adapter(CONFIG, lora, key=jax.random.key(1), dtype="float64")
    state, of_step = init_train_state(adapter, optimizer), batch(rows, 1)
    losses = []
    for _ in range(8):
        state, told = train_step(graphdef, optimizer, preference, state, of_step, base, parameters_of=lora)
        losses.append(float(told.measures.loss))
        if len(losses) == 1:
            assert abs(float(told.measures.margin)) <= 1e-12
    assert abs(losses[0] - np.log(2)) <= 1e-12
    assert losses[-1] < losses[0] - 0.1
    assert float(told.measures.accuracy) == 1
    held = evaluate_preferences(
        graphdef,
        base,
        [jax.tree.map(jnp.asarray, one) for one in single_pass(rows, micro_batches=1, rows=2)],
        preference,
    )
    assert held.pairs == len(LENGTHS)
    assert abs(held.loss - np.log(2)) <= 1e-12


@pytest.mark.usefixtures("x64", "compiled_quickly")
def test_b07_a_batch_without_pairs_moves_nothing():
    empty = batch(referenced(), 1)
    moved, told = stepped(empty._replace(weights=jnp.zeros_like(empty.weights)))
    assert float(told.totals.pairs) == 0
    assert all(float(value) == 0 for value in told.measures)
    assert bool(told.finite.all())
    jax.tree.map(np.testing.assert_array_equal, moved, parameters())


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"beta": 0.0}, r"preference.beta is 0.0, expected a number above 0"),
        ({"beta": float("nan")}, "preference.beta is nan"),
        (
            {"label_smoothing": 0.5},
            "preference.label_smoothing is 0.5, expected a number from 0 to below 0.5",
        ),
        ({"chosen_weight": -1.0}, "preference.chosen_weight is -1.0, expected a number of at least 0"),
    ],
)
def test_settings_out_of_range_are_refused(changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        Preference(**changes)
