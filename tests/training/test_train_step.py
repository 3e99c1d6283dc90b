"""A step is the same however its batch is split, and a gradient that is not finite moves nothing."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qwen35_jax.model import abstract_model
from qwen35_jax.sharding import parameter_axes
from qwen35_jax.training.objective import Batch, Objective, batch_loss, totals_of
from qwen35_jax.training.optimizers import OptimizerSettings, make_optimizer
from qwen35_jax.training.train_step import TrainState, init_train_state, train_step
from tests.small_text_model import FULL, LINEAR, draw, small_config, tree_difference

OBJECTIVE = Objective(mtp_weight=0.3, z_loss=1e-3)
TIME = 11


@functools.cache
def small_model(dtype: str = "float64"):
    config = small_config((LINEAR, FULL))
    graphdef, shapes = abstract_model(config, parameter_dtype=dtype, dtype=dtype, mtp=True)
    adamw = OptimizerSettings(learning_rate=1e-2, schedule="constant", weight_decay=0.1)
    return graphdef, shapes, make_optimizer(adamw, parameter_axes(graphdef, shapes), steps=10)


def parameters(dtype: str = "float64"):
    """New arrays each time: a step takes those that it is given."""
    return jax.tree_util.tree_map_with_path(draw, small_model(dtype)[1])


def rows(dtype: str = "float64") -> Batch:
    """Six rows: packed, with few and many targets, with padding on either side, without targets, without tokens."""
    rng = np.random.default_rng(1)
    segment_ids = np.array(
        [[1] * 5 + [2] * 6, [1] * 11, [0] * 4 + [1] * 7, [1] * 3 + [2] * 2 + [0] * 6, [1] * 11, [0] * 11]
    )
    weights = rng.integers(0, 2, segment_ids.shape).astype(float)
    weights[3, 1:3], weights[3, 4], weights[4] = 1, 1, 0
    tokens = rng.integers(0, 97, segment_ids.shape)
    return Batch(
        jnp.asarray(tokens, jnp.int32), jnp.asarray(segment_ids, jnp.int32), jnp.asarray(weights, dtype)
    )


def split(batch: Batch, micro_batches: int) -> Batch:
    return jax.tree.map(lambda array: array.reshape(micro_batches, -1, TIME), batch)


def stepped(batch: Batch, optimizer: optax.GradientTransformation):
    graphdef, _, _ = small_model()
    state = init_train_state(parameters(), optimizer)
    return train_step(graphdef, optimizer, OBJECTIVE, state, batch)


def values(state: TrainState):
    """What a state holds, on the host: a step takes the arrays."""
    return jax.tree.map(np.array, state._replace(key=jax.random.key_data(state.key)))


def test_b82_loss_gradients_and_update_are_the_same_however_a_step_is_split(x64):
    # A plain step shows the gradients; AdamW would divide rounding errors by themselves where one is 0.
    optimizer = optax.sgd(0.1)
    whole, told = stepped(split(rows(), 1), optimizer)
    assert bool(told.finite.all())
    assert int(whole.step) == 1
    for micro_batches in (2, 3, 6):
        parts, told_in_parts = stepped(split(rows(), micro_batches), optimizer)
        assert tree_difference(parts._replace(key=None), whole._replace(key=None)) <= 1e-12
        assert tree_difference(told_in_parts._replace(finite=0), told._replace(finite=0)) <= 1e-12


def test_b82_a_token_counts_the_same_in_a_short_and_in_a_long_document(x64):
    graphdef, _, _ = small_model()
    batch = rows()
    loss = jax.jit(batch_loss, static_argnums=(1, 4))
    known = parameters()
    totals = totals_of(batch)
    together, _ = loss(known, graphdef, batch, totals, Objective())
    apart = 0.0
    for row in range(6):
        one = jax.tree.map(lambda array, row=row: array[row : row + 1], batch)
        own = totals_of(one)
        mean, _ = loss(known, graphdef, one, own, Objective())
        apart += float(mean) * float(own.next_token) / float(totals.next_token)
    assert abs(float(together) / apart - 1) <= 1e-12


def test_the_first_tokens_of_documents_are_not_among_the_targets_nor_what_follows_in_another(x64):
    batch = rows()
    inside = [(row, t) for row in range(6) for t in range(TIME)]
    ids, weights = np.asarray(batch.segment_ids), np.asarray(batch.weights)
    for ahead, total in zip((1, 2), totals_of(batch), strict=True):
        expected = sum(
            weights[row, t]
            for row, t in inside
            if t >= ahead and ids[row, t] > 0 and len(set(ids[row, t - ahead : t + 1])) == 1
        )
        assert float(total) == expected


def test_b07_a_batch_without_targets_moves_parameters_by_their_decay_alone(x64):
    batch = split(rows(), 1)
    state, told = stepped(batch._replace(weights=jnp.zeros_like(batch.weights)), small_model()[2])
    assert float(told.measures.loss) == 0
    assert float(told.gradient_norm) == 0
    assert bool(told.finite.all())
    before = parameters()
    np.testing.assert_allclose(
        state.parameters["mtp"]["fc_weight"], before["mtp"]["fc_weight"] * (1 - 1e-2 * 0.1), rtol=1e-9
    )
    np.testing.assert_array_equal(state.parameters["final_norm"]["weight"], before["final_norm"]["weight"])


def test_a_gradient_that_is_not_finite_is_told_by_its_parameter_and_moves_nothing(x64):
    graphdef, _, optimizer = small_model()
    broken = parameters()
    broken["mtp"]["fc_weight"] = broken["mtp"]["fc_weight"].at[2, 1, 3].set(jnp.nan)
    before = values(init_train_state(broken, optimizer))
    state, told = train_step(
        graphdef, optimizer, OBJECTIVE, init_train_state(broken, optimizer), split(rows(), 2)
    )
    assert not bool(told.finite.all())
    assert not np.isfinite(float(told.measures.loss))
    jax.tree.map(np.testing.assert_array_equal, values(state), before)


def scaled_final_norm(trained, frozen, key):
    """The model's parameters, with a random factor on what is trained: its final norm."""
    factor = 1.0 if key is None else jax.random.uniform(key, minval=0.5)
    return frozen | {"final_norm": {"weight": factor * trained["weight"]}}


@pytest.mark.usefixtures("x64", "compiled_quickly")
def test_what_is_frozen_stays_and_what_is_random_follows_from_the_step_and_the_micro_batch():
    graphdef, _, _ = small_model()
    optimizer = optax.sgd(0.1)
    frozen = parameters()
    trained = frozen.pop("final_norm")
    start = init_train_state(jax.tree.map(np.asarray, trained), optimizer, seed=7)
    batch = split(jax.tree.map(lambda rows: jnp.concatenate([rows[:2], rows[:2]]), rows()), 2)
    key = jax.random.fold_in(jax.random.key(7), 3)

    def loss(weight):
        shares = [
            batch_loss(
                scaled_final_norm({"weight": weight}, frozen, jax.random.fold_in(key, index)),
                graphdef,
                jax.tree.map(lambda array, index=index: array[index], batch),
                totals_of(batch),
                OBJECTIVE,
            )[0]
            for index in range(2)
        ]
        return shares[0] + shares[1], shares[0] - shares[1]

    (_, difference), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(trained["weight"])
    assert abs(float(difference)) > 1e-3  # the same rows twice: only what is drawn differs
    state = start._replace(step=jnp.int32(3))
    before = jax.tree.map(np.array, frozen)
    state, _ = train_step(
        graphdef, optimizer, OBJECTIVE, state, batch, frozen, parameters_of=scaled_final_norm
    )
    np.testing.assert_allclose(state.parameters["weight"], trained["weight"] - 0.1 * gradient, rtol=1e-10)
    jax.tree.map(np.testing.assert_array_equal, frozen, before)
    assert state.key == jax.random.key(7)


def test_a_bfloat16_model_trains_float32_parameters(x64):
    config = small_config((LINEAR, FULL))
    graphdef, shapes = abstract_model(config, parameter_dtype="float32", dtype="bfloat16")
    optimizer = optax.sgd(0.1)
    state = init_train_state(jax.tree_util.tree_map_with_path(draw, shapes), optimizer)
    before = jax.tree.map(np.array, state.parameters)
    state, told = train_step(graphdef, optimizer, Objective(), state, split(rows("float32"), 2))
    assert told.measures.loss.dtype == jnp.float32
    for leaf, old in zip(jax.tree.leaves(state.parameters), jax.tree.leaves(before), strict=True):
        assert leaf.dtype == jnp.float32
        assert np.abs(np.asarray(leaf) - old).max() > 0
