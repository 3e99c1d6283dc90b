"""The matrix product of activations with a weight: rounded once, its gradient exact, one row as good as many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from qwen35_jax.ops.linear import linear

IN, OUT = 24, 40


def operands(rows: tuple[int, ...], dtype) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(len(rows))
    return jnp.asarray(rng.normal(size=(*rows, IN)), dtype), jnp.asarray(rng.normal(size=(OUT, IN)), dtype)


@pytest.mark.parametrize("rows", [(1,), (1, 1), (2, 3), (5,), ()])
def test_narrow_operands_are_summed_in_float32_and_rounded_once(rows):
    x, weight = operands(rows, jnp.bfloat16)
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    summed = linear(x, weight, dtype=jnp.float32)
    assert summed.dtype == jnp.float32
    np.testing.assert_allclose(summed, exact, rtol=1e-5, atol=1e-5)
    assert linear(x, weight).dtype == jnp.bfloat16
    np.testing.assert_array_equal(linear(x, weight), summed.astype(jnp.bfloat16))


@pytest.mark.parametrize("rows", [(1, 1), (2, 3)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_wide_operands_stay_wide_and_differentiate_both_ways(x64, rows, dtype):
    x, weight = operands(rows, dtype)
    y = linear(x, weight)
    assert y.dtype == dtype
    np.testing.assert_allclose(y, np.asarray(x) @ np.asarray(weight).T, rtol=1e-5)
    check_grads(linear, (x, weight), order=1, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("rows", [(1, 1), (2, 3)])
def test_a_narrow_gradient_is_the_wide_one_rounded_once(rows):
    x, weight = operands(rows, jnp.bfloat16)
    cotangent = jnp.asarray(np.random.default_rng(7).normal(size=(*rows, OUT)), jnp.bfloat16)

    def gradient(x, weight):
        _, pull = jax.vjp(linear, x, weight)
        return pull(cotangent.astype(x.dtype))

    narrow = gradient(x, weight)
    wide = gradient(x.astype(jnp.float32), weight.astype(jnp.float32))
    for found, expected in zip(narrow, wide, strict=True):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            found.astype(jnp.float32), expected.astype(jnp.bfloat16).astype(jnp.float32), rtol=2**-7
        )


def test_the_products_of_a_narrow_model_take_narrow_operands_forwards_and_backwards():
    """A float32 product of bfloat16 values is several times slower on every accelerator."""
    x, weight = operands((13, 11), jnp.bfloat16)
    program = jax.make_jaxpr(jax.grad(lambda x, w: linear(x, w).astype(jnp.float32).sum(), argnums=(0, 1)))
    text = str(program(x, weight))
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 3
    assert text.count("preferred_element_type=float32") == 3
    lowered = jax.jit(jax.grad(lambda x, w: linear(x, w).astype(jnp.float32).sum(), argnums=(0, 1)))
    dots = [line for line in lowered.lower(x, weight).as_text().splitlines() if "dot_general" in line]
    assert dots and all("bf16>, tensor<" in line and "f32>, tensor<" not in line for line in dots)
