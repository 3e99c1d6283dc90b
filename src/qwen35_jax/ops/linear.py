"""The matrix product of activations with a weight."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from qwen35_jax.ops.precision import product_precision

FEW_ROWS = 128
"""Up to so many rows, a CPU computes the product of narrow floats in another order."""


def linear(
    x: Float[Array, "*batch in"], weight: Float[Array, "out in"], dtype: DTypeLike | None = None
) -> Float[Array, "*batch out"]:
    """y[..., o] = sum over i of x[..., i] weight[o, i], operands in the dtype of `x`, summed in float32 (float64).

    Args:
        x: activations.
        weight: in the checkpoint's [out, in] order; cast to the dtype of `x`.
        dtype: of the result, that of `x` by default. The sums are rounded to it once.
    """
    dtype = x.dtype if dtype is None else jnp.dtype(dtype)
    weight = weight.astype(x.dtype)
    if jnp.finfo(x.dtype).bits >= 32:
        return jnp.einsum("...i,oi->...o", x, weight, precision=product_precision(x.dtype)).astype(dtype)
    return _narrow_linear(x, weight, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _narrow_linear(
    x: Float[Array, "*batch in"], weight: Float[Array, "out in"], dtype: jnp.dtype
) -> Float[Array, "*batch out"]:
    """`linear` for bfloat16 and float16 operands.

    The sum's dtype is asked for and rounded here: asked for a bfloat16 result, XLA's CPU compiler widens the operands
    first, which halves the speed of 512 rows. The derivative is written out because that of a product with a wider
    result would multiply a float32 gradient with the narrow operand, in float32.
    """
    rows = math.prod(x.shape[:-1])
    if rows > FEW_ROWS:
        product = _sum_in_float32(x, weight)
    else:
        on_cpu = _one_row_as_two if rows == 1 else _sum_in_float32 if rows < 8 else _weights_first
        product = jax.lax.platform_dependent(x, weight, cpu=on_cpu, default=_sum_in_float32)
    return product.astype(dtype)


def _sum_in_float32(
    x: Float[Array, "*batch in"], weight: Float[Array, "out in"]
) -> Float[Array, "*batch out"]:
    """The product over rows: with more axes, XLA's CPU compiler may widen and transpose the weight at every call."""
    rows = x.reshape(-1, x.shape[-1])
    product = jnp.einsum("ni,oi->no", rows, weight, preferred_element_type=jnp.float32)
    return product.reshape(*x.shape[:-1], -1)


def _weights_first(
    x: Float[Array, "*batch in"], weight: Float[Array, "out in"]
) -> Float[Array, "*batch out"]:
    """The product with its factors exchanged: XLA's CPU kernels walk the rows of the first, and these are many.

    Three to seven rows are filled up to eight, for which the kernels use more than one thread.
    """
    rows = x.reshape(-1, x.shape[-1])
    fill = 8 - len(rows) if 2 < len(rows) < 8 else 0
    filled = jnp.pad(rows, ((0, fill), (0, 0)))
    product = jnp.einsum("oi,ni->on", weight, filled, preferred_element_type=jnp.float32)
    return product[:, : len(rows)].T.reshape(*x.shape[:-1], -1)


def _one_row_as_two(
    x: Float[Array, "*batch in"], weight: Float[Array, "out in"]
) -> Float[Array, "*batch out"]:
    """XLA's CPU compiler has no kernel for one narrow row and is ten times slower than for two."""
    rows = jnp.broadcast_to(x.reshape(1, -1), (2, x.size))
    return _sum_in_float32(rows, weight)[0].reshape(*x.shape[:-1], -1)


def _narrow_linear_forward(x, weight, dtype):
    return _narrow_linear(x, weight, dtype), (x, weight)


def _narrow_linear_backward(dtype, operands, d_y):
    x, weight = operands
    d_y = d_y.astype(x.dtype)
    d_x = jnp.einsum("...o,oi->...i", d_y, weight, preferred_element_type=jnp.float32)
    d_weight = jnp.einsum("...o,...i->oi", d_y, x, preferred_element_type=jnp.float32)
    return d_x.astype(x.dtype), d_weight.astype(weight.dtype)


_narrow_linear.defvjp(_narrow_linear_forward, _narrow_linear_backward)
