"""Gated full attention: grouped heads, partial rotary embedding, and a sigmoid gate on each output channel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from qwen35_jax.cache import AttentionCache
from qwen35_jax.config import TextConfig
from qwen35_jax.logical_axes import time_axis
from qwen35_jax.nn.context import TokenContext
from qwen35_jax.nn.parameter import Keys, normal, parameter, zeros
from qwen35_jax.nn.projection import merge_heads, project
from qwen35_jax.ops.attention import attention
from qwen35_jax.ops.norms import rms_norm
from qwen35_jax.ops.rope import apply_rotary
from qwen35_jax.ops.sequence_parallel import attention_of_part, over_parts

Heads = Float[Array, "batch time heads head_dim"]
KeyValueHeads = Float[Array, "batch time kv_heads head_dim"]


class GatedAttention(nnx.Module):
    """The full-attention mixer. Its methods are the nodes of the graph, in order.

    Source: `Qwen3_5Attention` of the reference implementation. Its q_proj holds, for each head, the rows of the
    query and then those of the gate; here they are two parameters.
    """

    def __init__(self, config: TextConfig, *, parameter_dtype: DTypeLike, keys: Keys):
        embed = {"embed": config.hidden_size}
        head_dim = {"head_dim": config.head_dim}
        per_query = {"heads": config.num_attention_heads} | head_dim
        per_key = {"kv_heads": config.num_key_value_heads} | head_dim
        init = normal(config.initializer_range)

        self.q_weight = parameter(keys, init, per_query | embed, parameter_dtype)
        self.gate_weight = parameter(keys, init, per_query | embed, parameter_dtype)
        self.k_weight = parameter(keys, init, per_key | embed, parameter_dtype)
        self.v_weight = parameter(keys, init, per_key | embed, parameter_dtype)
        self.q_norm_weight = parameter(keys, zeros, head_dim, parameter_dtype)
        self.k_norm_weight = parameter(keys, zeros, head_dim, parameter_dtype)
        self.o_weight = parameter(keys, init, embed | per_query, parameter_dtype)
        self.has_bias = config.attention_bias
        if config.attention_bias:
            self.q_bias = parameter(keys, zeros, per_query, parameter_dtype)
            self.gate_bias = parameter(keys, zeros, per_query, parameter_dtype)
            self.k_bias = parameter(keys, zeros, per_key, parameter_dtype)
            self.v_bias = parameter(keys, zeros, per_key, parameter_dtype)
            self.o_bias = parameter(keys, zeros, embed, parameter_dtype)
        self.eps = config.rms_norm_eps

    def __call__(
        self,
        x: Float[Array, "batch time embed"],
        context: TokenContext,
        cache: AttentionCache | None,
    ) -> tuple[Float[Array, "batch time embed"], AttentionCache]:
        """Mixes over time.

        Args:
            x: normed hidden values.
            context: rotary phases, segment ids and how many tokens the cache holds.
            cache: keys and values of earlier tokens (read only), of all repeats of the pattern together; or None.

        Returns:
            The layer's contribution to the residual, and the keys and values of these tokens alone: the
            model writes them into the cache once, for all layers together.
        """
        q, gate, k, v = self.qkv_proj(x)
        q, k = self.qk_norm(q, k)
        q, k = self.rope(q, k, context)
        o = self.core(q, k, v, context, cache)
        if cache is not None:
            never = o[:, :, :1, :1] > jnp.inf
            k, v = jnp.where(never, 0, k), jnp.where(never, 0, v)
        o = self.gate(o, gate)
        return self.o_proj(o), AttentionCache(k, v)

    @jax.named_scope("attn.qkv_proj")
    def qkv_proj(
        self, x: Float[Array, "batch time embed"]
    ) -> tuple[Heads, Heads, KeyValueHeads, KeyValueHeads]:
        """Query, output gate, key and value of each token."""

        q, gate = project(x, self.q_weight[...]), project(x, self.gate_weight[...])
        k, v = project(x, self.k_weight[...]), project(x, self.v_weight[...])
        if self.has_bias:
            q, gate = q + self.q_bias[...].astype(x.dtype), gate + self.gate_bias[...].astype(x.dtype)
            k, v = k + self.k_bias[...].astype(x.dtype), v + self.v_bias[...].astype(x.dtype)
        return q, gate, k, v

    @jax.named_scope("attn.qk_norm")
    def qk_norm(self, q: Heads, k: KeyValueHeads) -> tuple[Heads, KeyValueHeads]:
        """Zero-centred RMS norm over each head's channels, before the rotation."""
        return (
            rms_norm(q, self.q_norm_weight[...], self.eps),
            rms_norm(k, self.k_norm_weight[...], self.eps),
        )

    @jax.named_scope("attn.rope")
    def rope(self, q: Heads, k: KeyValueHeads, context: TokenContext) -> tuple[Heads, KeyValueHeads]:
        """Rotates the leading channels of each head by the token's position."""
        cos, sin = context.rotary_cos, context.rotary_sin
        return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)

    @jax.named_scope("attn.core")
    def core(
        self,
        q: Heads,
        k: KeyValueHeads,
        v: KeyValueHeads,
        context: TokenContext,
        cache: AttentionCache | None,
    ) -> Heads:
        """Causal softmax attention over the cached tokens and these."""
        if cache is None and (axis := time_axis()):
            return over_parts(attention_of_part, axis, q, k, v, context.documents(q))
        return attention(
            q,
            k,
            v,
            segment_ids=context.segment_ids,
            past_k=None if cache is None else cache.key,
            past_v=None if cache is None else cache.value,
            past_lengths=None if cache is None else context.past_lengths,
            layer=None if cache is None else context.repeat,
            first_row=None if cache is None else context.first_row,
        )

    @jax.named_scope("attn.gate")
    def gate(self, o: Heads, gate: Heads) -> Heads:
        """Each output channel times the sigmoid of its gate."""
        return o * jax.nn.sigmoid(gate)

    @jax.named_scope("attn.o_proj")
    def o_proj(self, o: Heads) -> Float[Array, "batch time embed"]:
        """Back to the residual's width."""
        y = merge_heads(o, self.o_weight[...])
        return y + self.o_bias[...].astype(o.dtype) if self.has_bias else y
