"""Token by token from a cache, and all tokens at once: the same model, in float32 and in bfloat16."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from qwen35_jax.cache import init_cache
from qwen35_jax.model import abstract_model, decode_step, forward
from tests.inference.tiny_model import VOCABULARY, TinyModel

BATCH, TIME = 16, 32
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, TIME)))


def at_once_and_from_cache(
    tiny: TinyModel, dtype: str
) -> tuple[Float[np.ndarray, "batch time vocab"], Float[np.ndarray, "batch time vocab"]]:
    graphdef, _ = abstract_model(tiny.config, parameter_dtype=jnp.float32, dtype=dtype)
    at_once = jax.jit(forward, static_argnums=0)(graphdef, tiny.parameters, TOKENS)
    cache = init_cache(tiny.config.text, batch=BATCH, capacity=TIME, dtype=dtype)
    steps: list[Array] = []
    for tokens in TOKENS.T:
        logits, cache = decode_step(graphdef, tiny.parameters, tokens, cache)
        steps.append(logits)
    return np.asarray(at_once, np.float32), np.asarray(jnp.stack(steps, axis=1), np.float32)


def test_b20_decoding_equals_the_whole_sequence_and_adds_no_error_in_bfloat16(tiny: TinyModel) -> None:
    exact, exact_cached = at_once_and_from_cache(tiny, "float32")
    np.testing.assert_allclose(exact_cached, exact, atol=1e-4)

    rounded, rounded_cached = at_once_and_from_cache(tiny, "bfloat16")
    error, cached_error = (np.abs(logits - exact).mean() for logits in (rounded, rounded_cached))
    assert 1e-3 < error / np.abs(exact).mean() < 0.1  # it is bfloat16 indeed
    assert cached_error < 2 * error
    best = np.sort(exact, axis=-1)
    clear = best[..., -1] - best[..., -2] > 0.25
    assert clear.sum() > 200
    agree = rounded_cached.argmax(-1) == exact.argmax(-1)
    assert agree[clear].mean() >= 0.99
