"""Tokens that may not count: what is kept of them equals a cache that never saw the others."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qwen35_jax.cache import init_draft_cache
from qwen35_jax.model import abstract_model, decode_step, prefill
from tests.small_text_model import FULL, LINEAR, difference, draw, small_config

CONFIG = small_config((LINEAR, LINEAR, FULL) * 2)
PROMPT = np.array([[5, 9, 11, 3, 8, 2, 7], [4, 1, 6, 2, 0, 0, 0], [9, 0, 0, 0, 0, 0, 0]], np.int32)
LENGTHS = np.array([7, 4, 1])
GUESSES = np.random.default_rng(3).integers(0, 90, (3, 5)).astype(np.int32)


@pytest.fixture
def model(x64):
    graphdef, shapes = abstract_model(CONFIG, parameter_dtype="float64", dtype="float64", mtp=True)
    return graphdef, jax.tree_util.tree_map_with_path(draw, shapes)


def prompted(graphdef, parameters):
    from qwen35_jax.cache import init_cache

    cache = init_cache(CONFIG.text, batch=3, capacity=16, dtype="float64")
    segment_ids = (np.arange(7) < LENGTHS[:, None]).astype(np.int32)
    return prefill(graphdef, parameters, jnp.asarray(PROMPT), cache, segment_ids=jnp.asarray(segment_ids))[1]


@functools.partial(jax.jit, static_argnums=0)
def attempted(graphdef, parameters, tokens, cache, counts):
    model = nnx.merge(graphdef, parameters)
    x, updates = model.residual(tokens, None, jnp.ones_like(tokens), cache, tentative=True)
    return model.logits(model.normed(x)), cache.extended(updates, counts)


# Accepted counts on both sides of the convolution's reach of 3, all and none of the guesses, different in each row.
@pytest.mark.parametrize("accepted", [(5, 2, 3), (0, 5, 1), (4, 0, 5)])
def test_b39_b40_rejected_tokens_leave_no_trace_in_any_leaf_and_one_more_step_agrees(model, accepted):
    graphdef, parameters = model
    counts = jnp.asarray(np.arange(5) < np.array(accepted)[:, None])
    logits, cache = attempted(graphdef, parameters, GUESSES, prompted(graphdef, parameters), counts)
    plain = prompted(graphdef, parameters)
    for step in range(5):
        active = jnp.asarray(np.array(accepted) > step)
        expected, plain = decode_step(
            graphdef, parameters, jnp.asarray(GUESSES[:, step]), plain, active=active
        )
        rows = np.flatnonzero(active)
        assert difference(logits[rows, step], expected[rows]) <= 1e-12
    np.testing.assert_array_equal(cache.lengths, LENGTHS + accepted)
    for ours, theirs in zip(jax.tree.leaves(cache), jax.tree.leaves(plain), strict=True):
        assert difference(ours, theirs) <= 1e-12
    following, other = (decode_step(graphdef, parameters, jnp.array([3, 4, 5]), c)[0] for c in (cache, plain))
    assert difference(following, other) <= 1e-12


def test_the_draft_head_in_pieces_with_its_cache_equals_the_whole_sequence_at_once(model):
    graphdef, parameters = model
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 90, (2, 9)), jnp.int32)
    hidden = jnp.asarray(rng.standard_normal((2, 9, CONFIG.text.hidden_size)))
    head = nnx.merge(graphdef, parameters)
    whole = head.draft_hidden(hidden, tokens)
    cache = init_draft_cache(CONFIG.text, batch=2, capacity=12, dtype="float64")
    found = []
    for start, stop in ((1, 5), (5, 6), (6, 9)):
        ids = jnp.ones((2, stop - start), jnp.int32)
        drafted, cache = head.draft(hidden[:, start - 1 : stop - 1], tokens[:, start:stop], cache, ids)
        found.append(drafted)
    assert difference(np.concatenate(found, 1), whole) <= 1e-12
