"""Narrow floats that are written into are kept as bits on a CPU: the same values, and nothing is widened on the way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.ops.moving import from_storage, storage_dtype, to_storage

ODD = np.array([0.0, -0.0, 1.5, -3e38, np.inf, -np.inf, np.nan], np.float32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_what_is_stored_comes_back_bit_for_bit_in_its_dtype(dtype):
    values = jnp.asarray(ODD).astype(dtype)
    stored = to_storage(values, storage_dtype(dtype))
    assert stored.dtype == storage_dtype(dtype)
    back = from_storage(stored)
    assert back.dtype == dtype
    np.testing.assert_array_equal(np.array(back).view(np.uint8), np.array(values).view(np.uint8))


def test_only_bfloat16_is_stored_otherwise_and_only_on_a_cpu(monkeypatch):
    assert [storage_dtype(x) for x in (jnp.bfloat16, jnp.float16, jnp.float32)] == [
        jnp.uint16,
        jnp.float16,
        jnp.float32,
    ]
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert storage_dtype(jnp.bfloat16) == jnp.bfloat16


def test_writing_one_token_neither_widens_nor_copies_the_cache():
    cache = jnp.zeros((64, 32), storage_dtype(jnp.bfloat16))
    token = jnp.ones((1, 32), jnp.bfloat16)

    def write(cache, token, at):
        return cache.at[at].set(to_storage(token, cache.dtype))

    compiled = jax.jit(write, donate_argnums=0).lower(cache, token, jnp.array([5])).compile()
    assert "f32[64,32]" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < cache.nbytes
