"""Gated DeltaNet: a layer whose memory is one key_dim x value_dim matrix per head.

Each token fades the matrix, asks it what it holds for the token's key, writes the difference to the
token's value, and reads it with the token's query (Yang et al. 2024, "Gated Delta Networks", section 3).
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from qwen35_jax.cache import DeltaNetCache, DeltaNetInputs
from qwen35_jax.config import TextConfig
from qwen35_jax.logical_axes import time_axis
from qwen35_jax.nn.context import TokenContext
from qwen35_jax.nn.parameter import Keys, compute_dtype_for_state, normal, ones, parameter
from qwen35_jax.nn.projection import merge_heads, project
from qwen35_jax.ops.causal_conv import causal_conv
from qwen35_jax.ops.gated_delta_rule import gated_delta_rule
from qwen35_jax.ops.gated_delta_rule.tentative import tentative_outputs
from qwen35_jax.ops.norms import gated_rms_norm, l2_normalize
from qwen35_jax.ops.segments import is_real
from qwen35_jax.ops.sequence_parallel import causal_conv_of_part, gated_delta_rule_of_part, over_parts

KeyHeads = Float[Array, "batch time key_heads key_dim"]
ValueHeads = Float[Array, "batch time value_heads value_dim"]
PerHead = Float[Array, "batch time value_heads"]
State = Float[Array, "batch value_heads key_dim value_dim"]
Windows = tuple[Array, Array, Array]


def _log_of_uniform_decay_rate(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """A_log such that exp(A_log) is uniform in (0, 16), the range of the reference's initialisation."""
    return jnp.log(jax.random.uniform(key, shape, minval=1e-3, maxval=16.0)).astype(dtype)


def _inverse_softplus_of_time_step(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """dt_bias such that softplus(dt_bias) is log-uniform in (0.001, 0.1): heads start fast and slow."""
    step = jnp.exp(jax.random.uniform(key, shape, minval=jnp.log(1e-3), maxval=jnp.log(1e-1)))
    return (step + jnp.log(-jnp.expm1(-step))).astype(dtype)


class GatedDeltaNet(nnx.Module):
    """The linear-attention mixer. Its methods are the nodes of the graph, in order.

    Source: `Qwen3_5GatedDeltaNet` of the reference implementation; weights keep its [out, in] order, cut into
    parts and heads so that a mesh never cuts across parts.
    """

    def __init__(self, config: TextConfig, *, parameter_dtype: DTypeLike, keys: Keys):
        embed = {"embed": config.hidden_size}
        kernel = {"kernel": config.linear_conv_kernel_dim}
        key_heads = {"key_heads": config.linear_num_key_heads}
        value_heads = {"value_heads": config.linear_num_value_heads}
        per_key = key_heads | {"key_dim": config.linear_key_head_dim}
        per_value = value_heads | {"value_dim": config.linear_value_head_dim}
        init = normal(config.initializer_range)
        conv_init = normal(config.linear_conv_kernel_dim**-0.5)

        self.q_weight = parameter(keys, init, per_key | embed, parameter_dtype)
        self.k_weight = parameter(keys, init, per_key | embed, parameter_dtype)
        self.v_weight = parameter(keys, init, per_value | embed, parameter_dtype)
        self.z_weight = parameter(keys, init, per_value | embed, parameter_dtype)
        self.b_weight = parameter(keys, init, value_heads | embed, parameter_dtype)
        self.a_weight = parameter(keys, init, value_heads | embed, parameter_dtype)
        self.conv_q = parameter(keys, conv_init, kernel | per_key, parameter_dtype)
        self.conv_k = parameter(keys, conv_init, kernel | per_key, parameter_dtype)
        self.conv_v = parameter(keys, conv_init, kernel | per_value, parameter_dtype)
        self.A_log = parameter(keys, _log_of_uniform_decay_rate, value_heads, jnp.float32)
        self.dt_bias = parameter(keys, _inverse_softplus_of_time_step, value_heads, jnp.float32)
        self.norm_weight = parameter(keys, ones, {"value_dim": config.linear_value_head_dim}, jnp.float32)
        self.out_weight = parameter(keys, init, embed | per_value, parameter_dtype)
        self.eps = config.rms_norm_eps
        self.gate_activation: Literal["silu", "sigmoid"] = config.output_gate_type

    def __call__(
        self,
        x: Float[Array, "batch time embed"],
        context: TokenContext,
        cache: DeltaNetCache | None,
    ) -> tuple[Float[Array, "batch time embed"], DeltaNetCache | DeltaNetInputs | None]:
        """Mixes over time.

        Args:
            x: normed hidden values.
            context: segment ids of the tokens; padding changes neither window nor state.
            cache: conv windows and state before the first token, or None for an empty memory.

        Returns:
            The layer's contribution to the residual, and the cache after the last real token of each row (for
            tentative tokens, what each of them would do to it; None where the sequence is cut over devices and none
            of them has it).
        """
        windows = None if cache is None else (cache.window_q, cache.window_k, cache.window_v)
        state = None if cache is None else cache.state
        q, k, v, z, b, a = self.in_proj(x)
        if cache is None and (axis := time_axis()):
            o = self.over_parts(q, k, v, b, a, context.documents(x), axis)
            return self.out_proj(self.norm(o, z)), None
        conv_inputs = q, k, v
        # There is no padding among tentative tokens but in rows that are nothing else, whose outputs nobody reads.
        q, k, v, windows = self.conv(q, k, v, windows, None if context.tentative else context.segment_ids)
        if context.tentative:
            assert state is not None and context.segment_ids is not None
            o, writes = self.tentative_core(q, k, v, b, a, state, context.segment_ids)
            return self.out_proj(self.norm(o, z)), DeltaNetInputs(*conv_inputs, *writes)
        o, state = self.core(q, k, v, b, a, state, context.segment_ids)
        return self.out_proj(self.norm(o, z)), DeltaNetCache(*windows, state)

    @jax.named_scope("gdn.in_proj")
    def in_proj(
        self, x: Float[Array, "batch time embed"]
    ) -> tuple[KeyHeads, KeyHeads, ValueHeads, ValueHeads, PerHead, PerHead]:
        """q, k, v for the memory, z for the output gate, b for the write strength, a for the decay."""

        q = project(x, self.q_weight[...])
        k = project(x, self.k_weight[...])
        v = project(x, self.v_weight[...])
        z = project(x, self.z_weight[...])
        b = project(x, self.b_weight[...])
        a = project(x, self.a_weight[...])
        return q, k, v, z, b, a

    @jax.named_scope("gdn.conv")
    def conv(
        self,
        q: KeyHeads,
        k: KeyHeads,
        v: ValueHeads,
        windows: Windows | None,
        segment_ids: Int[Array, "batch time"] | None,
    ) -> tuple[KeyHeads, KeyHeads, ValueHeads, Windows]:
        """SiLU of a causal convolution over the last few tokens, each channel by itself."""
        window_q, window_k, window_v = (None, None, None) if windows is None else windows
        q, window_q = causal_conv(q, self.conv_q[...], window=window_q, segment_ids=segment_ids)
        k, window_k = causal_conv(k, self.conv_k[...], window=window_k, segment_ids=segment_ids)
        v, window_v = causal_conv(v, self.conv_v[...], window=window_v, segment_ids=segment_ids)
        return jax.nn.silu(q), jax.nn.silu(k), jax.nn.silu(v), (window_q, window_k, window_v)

    @jax.named_scope("gdn.core")
    def core(
        self,
        q: KeyHeads,
        k: KeyHeads,
        v: ValueHeads,
        b: PerHead,
        a: PerHead,
        state: State | None,
        segment_ids: Int[Array, "batch time"] | None,
    ) -> tuple[ValueHeads, State]:
        """The gated delta rule, with its gates; everything in float32 (float64 in a float64 model)."""
        q, k = self.normalized(q, k)
        log_decay, beta = self.gates(b, a)
        o, state = gated_delta_rule(q, k, v, log_decay, beta, initial_state=state, segment_ids=segment_ids)
        return o.astype(v.dtype), state

    @jax.named_scope("gdn.core")
    def tentative_core(
        self,
        q: KeyHeads,
        k: KeyHeads,
        v: ValueHeads,
        b: PerHead,
        a: PerHead,
        state: State,
        segment_ids: Int[Array, "batch time"],
    ) -> tuple[ValueHeads, tuple[KeyHeads, ValueHeads, PerHead]]:
        """`core` for tokens that may not count: what they read, and keys, corrections and decays of their writes."""
        q, k = self.normalized(q, k)
        log_decay, beta = self.gates(b, a)
        real = is_real(segment_ids)[..., None]
        q, k, values = (jnp.where(real[..., None], x, 0) for x in (q, k, v))
        log_decay, beta = jnp.where(real, log_decay, 0), jnp.where(real, beta, 0)
        o, corrections = tentative_outputs(q, k, values, log_decay, beta, state)
        return o.astype(v.dtype), (k, corrections, log_decay)

    def over_parts(
        self,
        q: KeyHeads,
        k: KeyHeads,
        v: ValueHeads,
        b: PerHead,
        a: PerHead,
        segment_ids: Int[Array, "batch time"],
        axis: str,
    ) -> ValueHeads:
        """`conv` and `core` over a sequence that is cut over a mesh axis, from an empty memory."""
        with jax.named_scope("gdn.conv"):
            q, k, v = (
                jax.nn.silu(over_parts(causal_conv_of_part, axis, x, segment_ids, same=(taps[...],)))
                for x, taps in ((q, self.conv_q), (k, self.conv_k), (v, self.conv_v))
            )
        with jax.named_scope("gdn.core"):
            q, k = self.normalized(q, k)
            o = over_parts(gated_delta_rule_of_part, axis, q, k, v, *self.gates(b, a), segment_ids)
            return o.astype(v.dtype)

    def normalized(self, q: KeyHeads, k: KeyHeads) -> tuple[KeyHeads, KeyHeads]:
        """Queries and keys as the delta rule takes them: of length key_dim**-0.5 and 1."""
        return l2_normalize(q) * q.shape[-1] ** -0.5, l2_normalize(k)

    def gates(self, b: PerHead, a: PerHead) -> tuple[PerHead, PerHead]:
        """Log decay and write strength of each token, in float32 (float64 in a float64 model)."""
        dtype = compute_dtype_for_state(b.dtype)
        rate = jnp.exp(self.A_log[...].astype(dtype))
        log_decay = -rate * jax.nn.softplus(a.astype(dtype) + self.dt_bias[...].astype(dtype))
        return log_decay, jax.nn.sigmoid(b.astype(dtype))

    @jax.named_scope("gdn.norm")
    def norm(self, o: ValueHeads, z: ValueHeads) -> ValueHeads:
        """RMS norm per head, then the gate. One weight vector serves all heads, and it is a plain factor."""
        return gated_rms_norm(o, z, self.norm_weight[...], self.eps, self.gate_activation)

    @jax.named_scope("gdn.out_proj")
    def out_proj(self, o: ValueHeads) -> Float[Array, "batch time embed"]:
        """Back to the residual's width."""
        return merge_heads(o, self.out_weight[...])
