"""Log-probabilities in blocks are those of the plain formula, and so are gradients of whatever is made of them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.training.log_probabilities import log_probabilities
from tests.small_text_model import difference

BATCH, TIME, EMBED, VOCABULARY = 2, 7, 5, 11


def inputs(dtype="float64"):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((BATCH, TIME, EMBED)), dtype)
    head = jnp.asarray(rng.standard_normal((VOCABULARY, EMBED)), dtype)
    return hidden, head, jnp.asarray(rng.integers(0, VOCABULARY, (BATCH, TIME)), jnp.int32)


def plain(hidden, head, targets):
    found = jax.nn.log_softmax(jnp.einsum("bte,ve->btv", hidden, head), axis=-1)
    return jnp.take_along_axis(found, targets[..., None], axis=-1)[..., 0]


def over_all(found):
    """Something that is no sum over tokens: each one's gradient depends on all others."""
    return jnp.log1p(jnp.square(found.sum(axis=1) - 3 * found[:, 2]).sum())


@pytest.mark.parametrize("positions", [1, 3, 7, 100])
def test_values_and_gradients_are_those_of_the_plain_formula_whatever_the_block(x64, positions):
    hidden, head, targets = inputs()
    block = positions * BATCH * VOCABULARY
    ours, expected = (
        jax.value_and_grad(lambda h, w, found=found: over_all(found(h, w, targets)), (0, 1))(hidden, head)
        for found in (functools.partial(log_probabilities, logits_in_a_block=block), plain)
    )
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert difference(one, other) <= 1e-13
    assert difference(log_probabilities(hidden, head, targets, block), plain(hidden, head, targets)) <= 1e-14


def test_b07_tokens_that_nothing_depends_on_add_nothing_even_where_they_are_not_finite(x64):
    hidden, head, targets = inputs()

    def first_row(hidden, head):
        return log_probabilities(hidden, head, targets)[0].sum()

    spoilt = jax.grad(first_row, (0, 1))(hidden.at[1, 3].set(jnp.inf), head)
    for one, other in zip(spoilt, jax.grad(first_row, (0, 1))(hidden, head), strict=True):
        np.testing.assert_array_equal(one, other)


def test_of_a_bfloat16_model_they_are_float32_and_gradients_have_the_dtypes_of_the_arguments():
    hidden, head, targets = inputs("float32")
    narrow = hidden.astype(jnp.bfloat16)
    assert log_probabilities(narrow, head, targets).dtype == jnp.float32
    gradients = jax.grad(lambda h, w: over_all(log_probabilities(h, w, targets)), (0, 1))(narrow, head)
    assert [gradient.dtype for gradient in gradients] == [jnp.bfloat16, jnp.float32]
    rounded = narrow.astype(jnp.float32), head.astype(jnp.bfloat16).astype(jnp.float32)
    expected = jax.grad(lambda h, w: over_all(plain(h, w, targets)), (0, 1))(*rounded)
    for one, other in zip(gradients, expected, strict=True):
        assert difference(one.astype(jnp.float32), other) <= 1e-2


def test_no_more_logits_than_a_block_are_held():
    time, vocabulary = 64, 512
    arguments = (
        jax.ShapeDtypeStruct((1, time, EMBED), jnp.float32),
        jax.ShapeDtypeStruct((vocabulary, EMBED), jnp.float32),
        jax.ShapeDtypeStruct((1, time), jnp.int32),
    )

    def temporary_bytes(positions: int) -> int:
        def gradients(hidden, head, targets):
            return jax.grad(
                lambda h, w: over_all(log_probabilities(h, w, targets, positions * vocabulary)), (0, 1)
            )(hidden, head)

        analysis = jax.jit(gradients).lower(*arguments).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    whole = 4 * time * vocabulary
    assert temporary_bytes(time) >= whole
    assert temporary_bytes(4) <= whole / 4
