"""Faults seen in other implementations, each with transformers as the judge."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers.models.qwen3_5.modeling_qwen3_5 as qwen35_module
from einops import rearrange
from flax import nnx
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from qwen35_jax.cache import DeltaNetCache, init_cache
from qwen35_jax.layer_groups import layer_locations
from qwen35_jax.model import decode_step, forward, prefill
from qwen35_jax.ops.norms import rms_norm
from qwen35_jax.verify.comparison import Pair, random_pair
from qwen35_jax.verify.nodes import layer_graphdef
from tests.reference.tiny_reference import TEXT, VOCAB, text_config

pytestmark = pytest.mark.reference

FLOAT32 = jnp.dtype("float32")


def our_layer(pair: Pair, index: int):
    """Layer `index` of the checkpoint, as a module."""
    at = list(layer_locations(pair.config.text))[index]
    stacked = pair.parameters["decoder"]["groups"][at.group]["layers"][at.position]
    parameters = jax.tree.map(lambda leaf: leaf[at.repeat], stacked)
    return nnx.merge(layer_graphdef(pair.config.text, pair.config.text.layer_types[index]), parameters)


@pytest.fixture(scope="module")
def four_layers() -> Pair:
    return random_pair(text_config(num_hidden_layers=4), 5, FLOAT32)


def test_b20_cached_and_uncached_runs_agree_with_the_reference_in_float32_and_bfloat16(four_layers):
    rows, first, total = 8, 16, 80
    tokens = np.random.default_rng(20).integers(0, VOCAB, (rows, total))
    with torch.no_grad():
        ids = torch.from_numpy(tokens)
        expected = four_layers.reference.float()(input_ids=ids, use_cache=False).logits.numpy()
    expected = expected[:, first:]
    scale = np.abs(expected).max()

    def errors(dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        pair = dataclasses.replace(random_pair(text_config(num_hidden_layers=4), 5, dtype), dtype=dtype)
        uncached = jax.jit(forward, static_argnums=0)(pair.graphdef, pair.parameters, tokens)[:, first:]
        cache = init_cache(pair.config.text, batch=rows, capacity=total, dtype=dtype)
        _, cache = prefill(pair.graphdef, pair.parameters, tokens[:, :first], cache)
        cached = []
        for step in range(first, total):
            logits, cache = decode_step(pair.graphdef, pair.parameters, tokens[:, step], cache)
            cached.append(np.asarray(logits))
        layers = [layer for group in cache.groups for layer in group]
        states = [layer.state for layer in layers if isinstance(layer, DeltaNetCache)]
        assert states
        chex.assert_type(states, jnp.float32)
        cached = np.stack(cached, axis=1)
        return np.abs(uncached - expected) / scale, np.abs(cached - expected) / scale, cached

    uncached, cached, _ = errors(FLOAT32)
    assert max(uncached.max(), cached.max()) <= 1e-4

    uncached, cached, logits = errors(jnp.dtype("bfloat16"))
    assert np.sqrt(np.mean(cached**2)) <= 2 * np.sqrt(np.mean(uncached**2))
    top = np.sort(expected, axis=-1)
    clear = top[..., -1] - top[..., -2] > 0.25
    assert clear.size == 512
    assert clear.sum() > 100
    assert (logits.argmax(-1) == expected.argmax(-1))[clear].mean() >= 0.99


def test_b27_each_head_reads_its_own_query_and_gate_rows():
    config = text_config(num_hidden_layers=4)
    heads, head_dim = config["num_attention_heads"], config["head_dim"]
    pair = random_pair(config, 27, FLOAT32)
    attention = pair.reference.float().model.layers[3].self_attn
    seen = {}
    attention.q_norm.register_forward_pre_hook(lambda module, args: seen.update(query=args[0]))
    attention.o_proj.register_forward_pre_hook(lambda module, args: seen.update(gated=args[0]))

    # With all values equal to one, attention gives one, and what enters o_proj is the sigmoid of the gate.
    def marked_interface(module, query, key, value, mask, **kwargs):
        return torch.ones_like(query.transpose(1, 2)), None

    x = torch.from_numpy(np.random.default_rng(27).standard_normal((2, 5, config["hidden_size"]), np.float32))
    tables = (torch.ones(2, 5, 6), torch.zeros(2, 5, 6))
    before = qwen35_module.eager_attention_forward
    qwen35_module.eager_attention_forward = marked_interface
    try:
        with torch.no_grad():
            attention(hidden_states=x, position_embeddings=tables, attention_mask=None)
    finally:
        qwen35_module.eager_attention_forward = before
    query, gate, _, _ = our_layer(pair, 3).mixer.qkv_proj(jnp.asarray(x.numpy()))
    expected = seen["query"].numpy()
    chex.assert_shape([query, expected], (2, 5, heads, head_dim))
    np.testing.assert_allclose(query, expected, atol=1e-5)
    gated = rearrange(seen["gated"].numpy(), "b t (h d) -> b t h d", h=heads)
    np.testing.assert_allclose(jax.nn.sigmoid(gate), gated, atol=1e-5)


def test_b28_norm_weights_are_deviations_from_one_as_in_the_reference():
    x = np.random.default_rng(28).standard_normal((3, 5, 12), np.float32) * 4
    norm = qwen35_module.Qwen3_5RMSNorm(12, eps=1e-6)
    assert not norm.weight.detach().numpy().any()
    identity = rms_norm(jnp.asarray(x), jnp.zeros(12), 1e-6)
    np.testing.assert_allclose(jnp.mean(identity**2, axis=-1), 1.0, rtol=1e-5)
    for weight in (np.zeros(12, np.float32), np.linspace(-0.9, 2, 12, dtype=np.float32)):
        with torch.no_grad():
            norm.weight.copy_(torch.from_numpy(weight))
            expected = norm(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(rms_norm(jnp.asarray(x), jnp.asarray(weight), 1e-6), expected, rtol=1e-5)


def test_b28_flat_projections_equal_the_grouped_ones_of_qwen3_next(four_layers):
    """The older family stores the same weights per key head: q, k, v, z of head 0, then of head 1."""
    mixer = our_layer(four_layers, 0).mixer
    names = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "linear_num_key_heads",
        "linear_num_value_heads",
    )
    sizes = {name: TEXT[name] for name in (*names, "linear_key_head_dim", "linear_value_head_dim")}
    older = Qwen3NextGatedDeltaNet(Qwen3NextConfig(**sizes), 0).eval()

    def grouped(*parts: nnx.Param) -> torch.Tensor:
        """Parts with a leading axis of key or value heads, cut per key head and laid one after the other."""
        cut = [
            np.asarray(part[...]).reshape(TEXT["linear_num_key_heads"], -1, TEXT["hidden_size"])
            for part in parts
        ]
        return torch.from_numpy(np.concatenate(cut, axis=1).reshape(-1, TEXT["hidden_size"]).copy())

    flat = four_layers.reference.float().model.layers[0].linear_attn
    weights = {
        "in_proj_qkvz.weight": grouped(mixer.q_weight, mixer.k_weight, mixer.v_weight, mixer.z_weight),
        "in_proj_ba.weight": grouped(mixer.b_weight, mixer.a_weight),
        **{name: value for name, value in flat.state_dict().items() if not name.startswith("in_proj")},
    }
    older.load_state_dict(weights)
    x = np.random.default_rng(29).standard_normal((2, 11, TEXT["hidden_size"]), np.float32)
    with torch.no_grad():
        expected = older(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(flat(torch.from_numpy(x)).numpy(), expected, atol=1e-5)
    ours = mixer.out_proj(_mix(mixer, jnp.asarray(x)))
    np.testing.assert_allclose(ours, expected, atol=1e-5 * np.abs(expected).max())


@jax.jit
def _convolved(mixer, x):
    q, k, v, z, b, a = mixer.in_proj(x)
    q, k, v, _ = mixer.conv(q, k, v, None, None)
    return mixer.core(q, k, v, b, a, None, None)[0], z


def _mix(mixer, x):
    core, z = _convolved(mixer, x)
    return mixer.norm(core, z)


def test_b29_value_heads_read_the_key_head_of_their_block(four_layers):
    """Without key head 1, value heads 2 and 3 fall silent in the reference and here, and 0 and 1 do not change."""
    reference = four_layers.reference.float().model.layers[0].linear_attn
    mixer = our_layer(four_layers, 0).mixer
    key_dim = TEXT["linear_key_head_dim"]
    x = np.random.default_rng(30).standard_normal((2, 9, TEXT["hidden_size"]), np.float32)
    cores = []
    original = qwen35_module.torch_chunk_gated_delta_rule

    def recorded(*args, **kwargs):
        result = original(*args, **kwargs)
        cores.append(result[0].numpy())
        return result

    rows = slice(
        3 * key_dim, 4 * key_dim
    )  # of in_proj_qkv: two heads of queries, then key head 0, key head 1
    kept = reference.in_proj_qkv.weight.detach().clone()
    qwen35_module.torch_chunk_gated_delta_rule = recorded
    try:
        with torch.no_grad():
            reference(torch.from_numpy(x))
            reference.in_proj_qkv.weight[rows] = 0
            reference(torch.from_numpy(x))
    finally:
        qwen35_module.torch_chunk_gated_delta_rule = original
        with torch.no_grad():
            reference.in_proj_qkv.weight.copy_(kept)
    whole, silenced = cores
    np.testing.assert_allclose(_convolved(mixer, jnp.asarray(x))[0], whole, atol=1e-5)
    mixer.k_weight[...] = mixer.k_weight[...].at[1].set(0)
    ours = np.asarray(_convolved(mixer, jnp.asarray(x))[0])
    np.testing.assert_allclose(ours, silenced, atol=1e-5)
    assert not ours[:, :, 2:].any()
    np.testing.assert_allclose(ours[:, :, :2], whole[:, :, :2], atol=1e-5)
