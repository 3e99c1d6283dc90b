"""Nodes of the two token mixers: Gated DeltaNet and gated attention. `spec/graph.py` explains the symbols."""

from __future__ import annotations

from typing import Any

from qwen35_jax.config import RopeConfig, TextConfig
from qwen35_jax.spec import tensors
from qwen35_jax.spec.node import Node, choose

L2_NORM_EPS = 1e-6  # of the queries and keys of the delta rule; no field of the configuration sets it
CHUNK_SIZE = 64  # tokens that the chunked delta rule takes at once, by default


def gated_delta_net_nodes(text: TextConfig, prefix: str) -> list[Node]:
    """Those of the Gated DeltaNet layers; `prefix` is what the names of a layer's tensors begin with."""
    layers = _layers_of(text, "linear_attention")
    if not layers:
        return []
    shapes = tensors.mixer(text, "linear_attention")
    embed, kernel = text.hidden_size, text.linear_conv_kernel_dim
    channels, values = shapes["linear_attn.in_proj_qkv.weight"][0], shapes["linear_attn.in_proj_z.weight"][0]
    key_heads, key_dim = text.linear_num_key_heads, text.linear_key_head_dim
    value_heads, value_dim = text.linear_num_value_heads, text.linear_value_head_dim
    outputs = channels + values + 2 * value_heads
    act = text.output_gate_type

    def node(name: str, op: str, maps: str, formula: str, constants: dict[str, Any], *names: str) -> Node:
        chosen = choose(shapes, prefix, *(f"linear_attn.{name}" for name in names)) if names else {}
        return Node(f"gdn.{name}", "gated_delta_net", op, layers, maps, formula, constants, chosen)

    return [
        node(
            "in_proj",
            "linear",
            f"{embed} -> {outputs}",
            "q, k, v, z, b, a = W u",
            {
                "in_features": embed,
                "out_features": outputs,
                "query": key_heads * key_dim,
                "key": key_heads * key_dim,
                "value": values,
                "output_gate_z": values,
                "write_strength_b": value_heads,
                "decay_a": value_heads,
            },
            "in_proj_",
        ),
        node(
            "conv",
            "depthwise conv",
            f"{channels} channels",
            f"{text.hidden_act}(sum_j w[j] u[t - {kernel - 1} + j]) of q, k, v; j = 0..{kernel - 1}",
            {"channels": channels, "kernel": kernel, "activation": text.hidden_act},
            "conv1d",
        ),
        node(
            "core",
            "gated delta rule",
            f"{value_heads} states, {key_dim} x {value_dim}",
            "q, k = scale l2(q), l2(k); beta = sigmoid(b); g = -exp(A_log) softplus(a + dt_bias); "
            "S = exp(g) S; S = S + k beta (v - k^T S)^T; o = q^T S",
            {
                "key_heads": key_heads,
                "value_heads": value_heads,
                "value_heads_per_key_head": text.value_heads_per_key_head,
                "key_dim": key_dim,
                "value_dim": value_dim,
                "scale": key_dim**-0.5,
                "l2_eps": L2_NORM_EPS,
                "chunk": CHUNK_SIZE,
            },
            "A_log",
            "dt_bias",
        ),
        node(
            "norm",
            "gated rms norm",
            f"{value_heads} heads of {value_dim}",
            f"rms(o) w {act}(z), head by head",
            {"eps": text.rms_norm_eps, "activation": act},
            "norm.",
        ),
        node(
            "out_proj",
            "linear",
            f"{values} -> {embed}",
            "W u",
            {"in_features": values, "out_features": embed},
            "out_proj",
        ),
    ]


def gated_attention_nodes(text: TextConfig, prefix: str) -> list[Node]:
    """Those of the full-attention layers; `prefix` is what the names of a layer's tensors begin with."""
    layers = _layers_of(text, "full_attention")
    if not layers:
        return []
    shapes = tensors.mixer(text, "full_attention")
    embed, heads, kv_heads = text.hidden_size, text.num_attention_heads, text.num_key_value_heads
    head_dim, rotary = text.head_dim, text.rotary_dim
    queries = heads * head_dim
    outputs = 2 * queries + 2 * kv_heads * head_dim
    bias = " + bias" if text.attention_bias else ""

    def node(name: str, op: str, maps: str, formula: str, constants: dict[str, Any], *names: str) -> Node:
        chosen = choose(shapes, prefix, *(f"self_attn.{name}" for name in names)) if names else {}
        return Node(f"attn.{name}", "attention", op, layers, maps, formula, constants, chosen)

    return [
        node(
            "qkv_proj",
            "linear",
            f"{embed} -> {outputs}",
            f"q, gate, k, v = W u{bias}",
            {
                "in_features": embed,
                "out_features": outputs,
                "query": queries,
                "gate": queries,
                "key": kv_heads * head_dim,
                "value": kv_heads * head_dim,
            },
            "q_proj",
            "k_proj",
            "v_proj",
        ),
        node(
            "qk_norm",
            "rms norm",
            f"{heads} + {kv_heads} heads of {head_dim}",
            "rms(q) (1 + w_q), rms(k) (1 + w_k), head by head",
            {"eps": text.rms_norm_eps},
            "q_norm",
            "k_norm",
        ),
        node(
            "rope",
            "rotary embedding",
            f"{rotary} of {head_dim} dimensions",
            f"turn the pair (i, i + {rotary // 2}) of q and k by position * theta^(-2i / {rotary}), "
            f"i = 0..{rotary // 2 - 1}" + (", stretched by YaRN" if text.rope.rope_type == "yarn" else ""),
            _rope_constants(text.rope, rotary),
        ),
        node(
            "core",
            "causal attention",
            f"{heads} query, {kv_heads} key heads",
            "softmax(scale q k^T) v over earlier tokens and itself",
            {
                "heads": heads,
                "kv_heads": kv_heads,
                "heads_per_kv_head": heads // kv_heads,
                "head_dim": head_dim,
                "scale": head_dim**-0.5,
            },
        ),
        node("gate", "sigmoid gate", f"{queries} -> {queries}", "o sigmoid(gate)", {}),
        node(
            "o_proj",
            "linear",
            f"{queries} -> {embed}",
            f"W u{bias}",
            {"in_features": queries, "out_features": embed},
            "o_proj",
        ),
    ]


def _rope_constants(rope: RopeConfig, rotary_dim: int) -> dict[str, Any]:
    constants: dict[str, Any] = {
        "theta": rope.rope_theta,
        "rotary_dim": rotary_dim,
        "mrope_section": list(rope.mrope_section),
    }
    if rope.rope_type == "yarn":
        constants["factor"] = rope.factor
        constants["original_max_position_embeddings"] = rope.original_max_position_embeddings
        constants["beta_fast"] = rope.beta_fast
        constants["beta_slow"] = rope.beta_slow
    return constants


def _layers_of(text: TextConfig, kind: str) -> tuple[int, ...]:
    return tuple(index for index, found in enumerate(text.layer_types) if found == kind)
