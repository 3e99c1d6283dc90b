"""Rows that are filled up to a round length are the rows that they were."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.model import abstract_model, forward
from qwen35_jax.training.objective import Batch, Objective, batch_loss, totals_of
from tests.small_text_model import COMPILE_QUICKLY, FULL, LINEAR, draw, small_config

LENGTH, MULTIPLE = 1234, 8
PADDED = -(-LENGTH // MULTIPLE) * MULTIPLE


@pytest.fixture(scope="module")
def model():
    graphdef, shapes = abstract_model(
        small_config((LINEAR, FULL)), parameter_dtype="float32", dtype="float32", mtp=True
    )
    return graphdef, jax.tree_util.tree_map_with_path(draw, shapes)


def padded(array: np.ndarray, value: float) -> np.ndarray:
    """With its last axis, time, filled up."""
    return np.pad(
        array, ((0, 0),) * (array.ndim - 1) + ((0, PADDED - array.shape[-1]),), constant_values=value
    )


def test_b11_a_packed_row_that_is_padded_to_a_multiple_has_the_loss_of_the_row_itself(model):
    graphdef, parameters = model
    rng = np.random.default_rng(11)
    tokens = rng.integers(1, 60, (2, LENGTH))
    segment_ids = np.repeat([[1, 2, 3], [1, 1, 2]], [700, 431, 103], axis=1)
    weights = rng.integers(0, 3, (2, LENGTH)).astype(np.float32)
    objective = Objective(mtp_weight=0.3, z_loss=1e-3)

    @functools.partial(jax.jit, compiler_options=COMPILE_QUICKLY)
    def losses(batch: Batch):
        return batch_loss(parameters, graphdef, batch, totals_of(batch), objective)[1]

    alone = losses(Batch(jnp.asarray(tokens), jnp.asarray(segment_ids), jnp.asarray(weights)))
    filled = Batch(padded(tokens, 5), padded(segment_ids, 0), padded(weights, 9))
    assert filled.tokens.shape == (2, 1240)
    for ours, expected in zip(losses(jax.tree.map(jnp.asarray, filled)), alone, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-6)


def test_b11_positions_that_are_given_are_padded_with_their_tokens(model):
    """Three rows of positions for each row of tokens, as pictures have them; those of the padding mean nothing."""
    graphdef, parameters = model
    rng = np.random.default_rng(12)
    tokens = rng.integers(1, 60, (1, LENGTH))
    positions = np.sort(rng.integers(0, LENGTH, (3, 1, LENGTH)), axis=-1)

    @functools.partial(jax.jit, compiler_options=COMPILE_QUICKLY)
    def logits(tokens, positions, segment_ids):
        return forward(
            graphdef, parameters, tokens, positions=positions, segment_ids=segment_ids, rematerialize="none"
        )

    alone = logits(tokens, positions, np.ones_like(tokens))
    filled = logits(padded(tokens, 5), padded(positions, 77), padded(np.ones_like(tokens), 0))
    assert filled.shape[1] == PADDED
    np.testing.assert_allclose(filled[:, :LENGTH], alone, rtol=0, atol=1e-5 * float(jnp.abs(alone).max()))
    assert not np.allclose(logits(tokens, positions[[0, 2, 1]], np.ones_like(tokens)), alone, atol=1e-3)
