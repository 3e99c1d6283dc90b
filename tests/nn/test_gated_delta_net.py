"""The Gated DeltaNet layer: which head reads which, what the output gate does, and its parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qwen35_jax.nn.gated_delta_net import GatedDeltaNet
from tests.small_text_model import difference, draw, small_config

BATCH, TIME = 2, 5


def mixer(**changes) -> GatedDeltaNet:
    """One layer with drawn parameters."""
    module = GatedDeltaNet(small_config(**changes).text, parameter_dtype="float32", keys=None)
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(draw, nnx.to_pure_dict(state)))


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((BATCH, TIME, *shape)), jnp.float32)


@jax.jit
def core(q, k, v, b, a):
    return mixer().core(q, k, v, b, a, None, None)


def test_b29_value_heads_2_and_3_use_key_head_1():
    q, k = normal(1, 2, 16), normal(2, 2, 16)
    v, b, a = normal(3, 4, 12), normal(4, 4), normal(5, 4)
    whole, state = core(q, k, v, b, a)
    assert np.all(np.any(whole, axis=(0, 1, 3)))
    for query, key in ((q.at[:, :, 1].set(0), k), (q, k.at[:, :, 1].set(0))):
        o, _ = core(query, key, v, b, a)
        assert not np.any(o[:, :, 2:])
        assert np.array_equal(o[:, :, :2], whole[:, :, :2])
    _, state_without = core(q, k.at[:, :, 1].set(0), v, b, a)
    assert not np.any(state_without[:, 2:])
    assert np.array_equal(state_without[:, :2], state[:, :2])


def test_b30_the_norm_comes_before_the_gate():
    module = mixer()
    o, z = normal(1, 4, 12), normal(2, 4, 12)
    gated = module.norm(o, z)
    assert difference(module.norm(10 * o, z), gated) <= 1e-4
    assert difference(module.norm(o, 10 * z), gated) > 0.5


@pytest.mark.parametrize("gate_type", ["silu", "sigmoid"])
def test_b30_the_gate_is_the_one_that_the_config_names(gate_type):
    module = mixer(output_gate_type=gate_type)
    o, z = (np.asarray(normal(seed, 4, 12), np.float64) for seed in (1, 2))
    gate = (z if gate_type == "silu" else 1) / (1 + np.exp(-z))
    normed = o / np.sqrt((o**2).mean(axis=-1, keepdims=True) + 1e-6) * np.asarray(module.norm_weight[...])
    assert difference(module.norm(jnp.float32(o), jnp.float32(z)), normed * gate) <= 1e-6


def test_the_size_of_a_query_or_key_does_not_matter_and_its_direction_does():
    q, k = normal(1, 2, 16), normal(2, 2, 16)
    rest = normal(3, 4, 12), normal(4, 4), normal(5, 4)
    o, _ = core(q, k, *rest)
    assert difference(core(3 * q, 5 * k, *rest)[0], o) <= 1e-5
    assert difference(core(k, q, *rest)[0], o) > 0.1


def test_the_decay_of_the_small_model_is_weak():
    """Tests of what a state carries rest on this: |log decay| is at most 0.05 for what a norm lets through."""
    module = mixer()
    x = normal(6, 40) * (1 + 0.3 * 3)
    a = module.in_proj(x)[5]
    log_decay = -jnp.exp(module.A_log[...]) * jax.nn.softplus(a + module.dt_bias[...])
    assert np.all(log_decay < 0)
    assert np.all(log_decay >= -0.05)
