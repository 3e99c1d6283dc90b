"""Chunks as affine maps of the state: what a device sends to the next when a sequence is cut across devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from qwen35_jax.ops.gated_delta_rule.associative import StateMap, chunk_map, compose
from qwen35_jax.ops.gated_delta_rule.chunk import apart, chunk_terms, side_by_side, split
from qwen35_jax.ops.gated_delta_rule.grouped import GroupedInputs
from tests.ops.gated_delta_rule.oracle import example, loop, relative_error


def random_map(seed):
    rng = np.random.default_rng(seed)
    return StateMap(jnp.asarray(rng.normal(size=(3, 4, 4))), jnp.asarray(rng.normal(size=(3, 4, 5))))


def test_composition_applies_the_first_map_first_and_is_associative(x64):
    a, b, c = (random_map(seed) for seed in range(3))
    state = jnp.asarray(np.random.default_rng(3).normal(size=(3, 4, 5)))
    assert relative_error(compose(a, b)(state), b(a(state))) < 1e-14
    left, right = compose(compose(a, b), c), compose(a, compose(b, c))
    for x, y in zip(left, right, strict=True):
        assert relative_error(x, y) < 1e-13


def test_the_map_of_a_chunk_moves_any_state_as_its_tokens_do(x64):
    arrays = example(6, batch=2, time=11, key_heads=2, group=3, key_dim=8, value_dim=5, keys="correlated")
    v, log_decay, beta = (
        jnp.asarray(arrays[n].reshape(2, 11, 2, 3, *arrays[n].shape[3:])) for n in ("v", "log_decay", "beta")
    )

    @jax.jit
    def moved(state):
        inputs = GroupedInputs(jnp.asarray(arrays["q"]), jnp.asarray(arrays["k"]), v, log_decay, beta)
        chunk = split(inputs, None, 11)
        return chunk_map(chunk_terms(jax.tree.map(lambda x: x[:, 0], chunk)))(state)

    state = arrays["initial_state"].reshape(2, 2, 3, 8, 5)
    _, expected = loop(**arrays)
    assert relative_error(moved(state), expected.reshape(2, 2, 3, 8, 5)) < 1e-13


def test_value_heads_stand_side_by_side_and_come_apart_again():
    x = jnp.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    wide = side_by_side(x)
    np.testing.assert_array_equal(wide[1, 2], jnp.concatenate([x[1, g, 2] for g in range(3)]))
    np.testing.assert_array_equal(apart(wide, 3), x)
