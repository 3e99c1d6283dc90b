"""The loss in blocks is the plain formula, in value and gradients, and holds one block of logits at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.training.cross_entropy import (
    LOGITS_IN_A_BLOCK,
    LOGITS_IN_A_PIECE,
    _pieces,
    cross_entropy,
)
from tests.small_text_model import difference

BATCH, TIME, EMBED, VOCABULARY = 2, 7, 5, 11


def inputs(dtype="float64"):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((BATCH, TIME, EMBED)), dtype)
    head = jnp.asarray(rng.standard_normal((VOCABULARY, EMBED)), dtype)
    targets = jnp.asarray(rng.integers(0, VOCABULARY, (BATCH, TIME)), jnp.int32)
    weights = jnp.asarray(rng.integers(0, 3, (BATCH, TIME)) / 4.0, dtype)
    return hidden, head, targets, weights


def plain(hidden, head, targets, weights, z_loss=0.0):
    logits = jnp.einsum("bte,ve->btv", hidden, head)
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    of_target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.sum(weights * (log_normalizer - of_target + z_loss * log_normalizer**2))


@pytest.mark.parametrize("positions", [1, 3, 7, 100])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_value_and_gradients_are_those_of_the_plain_formula_whatever_the_block(x64, positions, z_loss):
    hidden, head, targets, weights = inputs()
    block = positions * BATCH * VOCABULARY

    def ours(hidden, head):
        sums = cross_entropy(hidden, head, targets, weights, z_loss=z_loss, logits_in_a_block=block)
        return 3.0 * sums.loss, sums

    (loss, sums), gradients = jax.value_and_grad(ours, (0, 1), has_aux=True)(hidden, head)
    expected, expected_gradients = jax.value_and_grad(plain, (0, 1))(hidden, head, targets, weights, z_loss)
    assert difference(loss, 3 * expected) <= 1e-14
    assert difference(sums.cross_entropy, plain(hidden, head, targets, weights)) <= 1e-14
    for one, other in zip(gradients, expected_gradients, strict=True):
        assert difference(one, 3 * other) <= 1e-14
    assert difference(cross_entropy(hidden, head, targets, weights, z_loss=z_loss).loss, expected) <= 1e-14


def test_correct_counts_the_weights_of_targets_with_the_largest_logit(x64):
    hidden, head, targets, weights = inputs()
    best = jnp.argmax(jnp.einsum("bte,ve->btv", hidden, head), axis=-1)
    targets = targets.at[:, :3].set(best[:, :3].astype(jnp.int32))
    correct = cross_entropy(hidden, head, targets, weights, logits_in_a_block=1).correct
    np.testing.assert_allclose(correct, jnp.sum(weights * (targets == best)))


def test_b07_tokens_of_weight_zero_add_nothing_even_where_they_are_not_finite(x64):
    hidden, head, targets, weights = inputs()
    weights = weights.at[1].set(0)
    targets = targets.at[1, 2].set(-100)
    spoilt = hidden.at[1, 3].set(jnp.inf)
    loss, gradients = jax.value_and_grad(lambda *a: cross_entropy(*a, targets, weights).loss, (0, 1))(
        spoilt, head
    )
    expected = jax.grad(plain, (0, 1))(hidden[:1], head, targets[:1], weights[:1])
    assert difference(gradients[0], jnp.pad(expected[0], ((0, 1), (0, 0), (0, 0)))) <= 1e-14
    np.testing.assert_allclose(loss, plain(hidden[:1], head, targets[:1], weights[:1]), rtol=1e-14)
    empty = cross_entropy(hidden, head, targets, jnp.zeros_like(weights))
    assert all(float(value) == 0 for value in empty)


def test_a_bfloat16_model_sums_in_float32_and_gives_gradients_in_the_dtypes_of_its_arguments():
    hidden, head, targets, weights = inputs("float32")
    narrow = hidden.astype(jnp.bfloat16)
    gradients = jax.grad(lambda h, w: cross_entropy(h, w, targets, weights).loss, (0, 1))(narrow, head)
    assert [gradient.dtype for gradient in gradients] == [jnp.bfloat16, jnp.float32]
    rounded = narrow.astype(jnp.float32), head.astype(jnp.bfloat16).astype(jnp.float32)
    expected = jax.grad(plain, (0, 1))(*rounded, targets, weights)
    for one, other in zip(gradients, expected, strict=True):
        assert difference(one.astype(jnp.float32), other) <= 1e-2
    assert cross_entropy(narrow, head, targets, weights).loss.dtype == jnp.float32


def test_no_more_logits_than_a_block_are_held():
    time, vocabulary = 64, 512
    arguments = (
        jax.ShapeDtypeStruct((1, time, EMBED), jnp.float32),
        jax.ShapeDtypeStruct((vocabulary, EMBED), jnp.float32),
        jax.ShapeDtypeStruct((1, time), jnp.int32),
        jax.ShapeDtypeStruct((1, time), jnp.float32),
    )

    def temporary_bytes(positions: int) -> int:
        def gradients(*arguments):
            return jax.grad(
                lambda *a: cross_entropy(*a, logits_in_a_block=positions * vocabulary).loss, argnums=(0, 1)
            )(*arguments)

        analysis = jax.jit(gradients).lower(*arguments).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    whole = 4 * time * vocabulary
    assert temporary_bytes(time) >= whole
    assert temporary_bytes(4) <= whole / 4


@pytest.mark.parametrize(("piece", "pieces"), [(1, 11), (12, 11), (48, 1), (10**6, 1)])
def test_pieces_of_the_vocabulary_change_neither_value_nor_gradients(x64, piece, pieces):
    hidden, head, targets, weights = inputs()
    block = 3 * BATCH * VOCABULARY
    assert _pieces(VOCABULARY, piece // (BATCH * 3)) == pieces

    def ours(hidden, head):
        return cross_entropy(
            hidden, head, targets, weights, z_loss=0.01, logits_in_a_block=block, logits_in_a_piece=piece
        ).loss

    loss, gradients = jax.value_and_grad(ours, (0, 1))(hidden, head)
    expected, expected_gradients = jax.value_and_grad(plain, (0, 1))(hidden, head, targets, weights, 0.01)
    assert difference(loss, expected) <= 1e-14
    for one, other in zip(gradients, expected_gradients, strict=True):
        assert difference(one, other) <= 1e-14


def test_the_published_vocabulary_is_cut_into_pieces_that_fit_a_cache_and_cover_it():
    vocabulary = 248_320
    rows = LOGITS_IN_A_BLOCK // vocabulary
    pieces = _pieces(vocabulary, LOGITS_IN_A_PIECE // rows)
    assert vocabulary % pieces == 0
    assert LOGITS_IN_A_PIECE / 4 <= rows * vocabulary / pieces <= LOGITS_IN_A_PIECE


def test_a_sequence_that_takes_several_blocks_is_cut_evenly_so_that_no_block_is_mostly_padding():
    time, vocabulary = 33, 64

    def flops(positions: int) -> float:
        arguments = (
            jax.ShapeDtypeStruct((1, time, EMBED), jnp.float32),
            jax.ShapeDtypeStruct((vocabulary, EMBED), jnp.float32),
            jax.ShapeDtypeStruct((1, time), jnp.int32),
            jax.ShapeDtypeStruct((1, time), jnp.float32),
        )
        loss = jax.jit(lambda *a: cross_entropy(*a, logits_in_a_block=positions * vocabulary).loss)
        analysis = loss.lower(*arguments).compile().cost_analysis()
        assert analysis is not None
        return analysis["flops"]  # of a loop's body once

    # 33 tokens in blocks of at most 32 are 17 and 16, not 32 and 1.
    assert flops(32) <= 0.6 * flops(33)
