"""Tokens that may not count: outputs of all, and the state after any number of them, are those of the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.ops.gated_delta_rule import gated_delta_rule
from qwen35_jax.ops.gated_delta_rule.tentative import state_after, tentative_outputs
from qwen35_jax.ops.norms import l2_normalize

BATCH, TIME, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 3, 5, 2, 6, 7, 4


def inputs(log_decay: float):
    rng = np.random.default_rng(0)
    q, k = (l2_normalize(jnp.asarray(rng.normal(size=(BATCH, TIME, KEY_HEADS, KEY_DIM)))) for _ in range(2))
    v = jnp.asarray(rng.normal(size=(BATCH, TIME, HEADS, VALUE_DIM)))
    decay = jnp.asarray(log_decay * rng.uniform(0.5, 1.5, (BATCH, TIME, HEADS)))
    beta = jnp.asarray(rng.uniform(0, 1, (BATCH, TIME, HEADS)))
    return (q, k, v, decay, beta), jnp.asarray(rng.normal(size=(BATCH, HEADS, KEY_DIM, VALUE_DIM)))


@pytest.mark.parametrize("log_decay", [-1e-3, -2.0, -900.0])
def test_whatever_counts_outputs_and_state_are_those_of_the_tokens_that_do(x64, log_decay):
    tokens, state = inputs(log_decay)
    outputs, corrections = tentative_outputs(*tokens, state)
    expected, _ = gated_delta_rule(*tokens, initial_state=state, method="recurrent")
    np.testing.assert_allclose(outputs, expected, atol=1e-12)
    for accepted in ((0, 1, 2), (3, 4, 5), (5, 0, 3)):
        counts = jnp.arange(TIME) < jnp.array(accepted)[:, None]
        _, k, _, decay, _ = tokens
        after = state_after(state, k, corrections, decay, counts)
        _, plain = gated_delta_rule(
            *tokens, initial_state=state, segment_ids=counts.astype(jnp.int32), method="recurrent"
        )
        np.testing.assert_allclose(after, plain, atol=1e-12)
    assert float(jnp.abs(after[1] - state[1]).max()) == 0  # a row of which nothing counts stays bit for bit


def test_b14_a_late_decay_is_not_lost_behind_a_strong_one():
    tokens, state = inputs(-1e-3)
    q, k, v, decay, beta = (x.astype(jnp.float32) for x in tokens)
    decay = decay.at[:, 1].set(-2000.0)
    outputs, _ = tentative_outputs(q, k, v, decay, beta, state.astype(jnp.float32))
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in (q, k, v, decay, beta)]
        expected, _ = gated_delta_rule(
            *wide, initial_state=jnp.asarray(np.asarray(state), jnp.float64), method="recurrent"
        )
    np.testing.assert_allclose(outputs, expected, atol=2e-6)
