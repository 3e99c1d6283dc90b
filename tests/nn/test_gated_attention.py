"""The gated attention layer: which head reads which, its gate, its norms and its biases."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qwen35_jax.nn.context import TokenContext
from qwen35_jax.nn.gated_attention import GatedAttention
from tests.small_text_model import difference, draw, small_config

BATCH, TIME = 2, 5


def mixer(**changes) -> GatedAttention:
    """One layer with drawn parameters."""
    module = GatedAttention(small_config(**changes).text, parameter_dtype="float32", keys=None)
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(draw, nnx.to_pure_dict(state)))


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((BATCH, TIME, *shape)), jnp.float32)


def context() -> TokenContext:
    phase = normal(7, 4)
    return TokenContext(jnp.cos(phase), jnp.sin(phase), None, None)


@jax.jit
def core(q, k, v):
    return mixer().core(q, k, v, context(), None)


def test_query_heads_2_and_3_read_key_value_head_1():
    q, k, v = normal(1, 4, 32), normal(2, 2, 32), normal(3, 2, 32)
    whole = core(q, k, v)
    o = core(q, k, v.at[:, :, 1].set(0))
    assert not np.any(o[:, :, 2:])
    assert np.array_equal(o[:, :, :2], whole[:, :, :2])
    o = core(q, k.at[:, :, 1].set(0), v)
    assert difference(o[:, :, 2:], jnp.repeat(_running_mean(v[:, :, 1:]), 2, axis=2)) <= 1e-6


def _running_mean(v: jax.Array) -> jax.Array:
    return jnp.cumsum(v, axis=1) / jnp.arange(1, TIME + 1)[:, None, None]


def test_each_channel_of_the_output_has_a_gate_of_its_own():
    module, o, gate = mixer(), normal(1, 4, 32), normal(2, 4, 32)
    expected = np.asarray(o, np.float64) / (1 + np.exp(-np.asarray(gate, np.float64)))
    assert difference(module.gate(o, gate), expected) <= 1e-6
    shut = module.gate(o, gate.at[:, :, 3, 31].set(-jnp.inf))
    assert not np.any(shut[:, :, 3, 31])
    assert np.array_equal(shut[:, :, :3], module.gate(o, gate)[:, :, :3])


def test_query_and_key_are_normed_per_head_and_before_they_are_rotated():
    module, q, k = mixer(), normal(1, 4, 32), normal(2, 2, 32)
    normed_q, normed_k = module.qk_norm(q, k)
    scaled_q, scaled_k = module.qk_norm(q.at[:, :, 2].multiply(9), k.at[:, :, 0].multiply(9))
    assert difference(scaled_q, normed_q) <= 1e-5
    assert difference(scaled_k, normed_k) <= 1e-5
    # Rotation keeps lengths, and the channels behind the rotated ones as they are.
    rotated, _ = module.rope(normed_q, normed_k, context())
    assert difference((rotated**2).sum(-1), (normed_q**2).sum(-1)) <= 1e-5
    assert np.array_equal(rotated[..., 8:], normed_q[..., 8:])
    assert not np.array_equal(rotated[..., :8], normed_q[..., :8])


def test_biases_are_added_to_each_projection_where_the_config_asks_for_them():
    assert not hasattr(mixer(), "q_bias")
    module, x = mixer(attention_bias=True), normal(1, 40)
    for projected, name in zip(module.qkv_proj(0 * x), ("q", "gate", "k", "v"), strict=True):
        bias = getattr(module, f"{name}_bias")[...]
        assert np.any(bias)
        assert np.array_equal(projected, np.broadcast_to(bias, projected.shape))
    assert np.array_equal(
        module.o_proj(normal(2, 4, 32) * 0), np.broadcast_to(module.o_bias[...], (BATCH, TIME, 40))
    )
