"""Narrow floats are moved as bits on a CPU: the same values, and nothing is widened on the way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.ops.moving import as_bits

ODD = np.array([0.0, -0.0, 1.5, -3e38, np.inf, -np.inf, np.nan], np.float32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.int32])
def test_a_scatter_and_a_slice_move_every_value_unchanged(dtype):
    values = ODD[:4] if dtype == jnp.int32 else ODD
    old = jnp.tile(jnp.asarray(values).astype(dtype), (5, 1))
    new = jnp.asarray(values[::-1].copy()).astype(dtype)[None]
    written = as_bits(lambda old, new: old.at[jnp.array([3])].set(new))(old, new)
    assert written.dtype == dtype
    expected = np.array(old)
    expected[3] = np.array(new)[0]
    np.testing.assert_array_equal(np.array(written).view(np.uint8), expected.view(np.uint8))
    cut = as_bits(lambda x: jax.lax.dynamic_slice_in_dim(x, 3, 1, 0))(written)
    np.testing.assert_array_equal(np.array(cut).view(np.uint8), expected[3:4].view(np.uint8))


def test_writing_one_token_widens_no_cache_on_a_cpu():
    cache, token = jnp.zeros((64, 32), jnp.bfloat16), jnp.ones((1, 32), jnp.bfloat16)

    def write(cache, token, at):
        return as_bits(lambda cache, token: cache.at[at].set(token))(cache, token)

    compiled = jax.jit(write, donate_argnums=0).lower(cache, token, jnp.array([5])).compile().as_text()
    assert "f32[64,32]" not in compiled and "u16[64,32]" in compiled
