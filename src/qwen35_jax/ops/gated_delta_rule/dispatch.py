"""The gated delta rule as one function: inputs are checked and put in order, then one of the methods runs."""

from typing import Literal, get_args

import einops
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qwen35_jax.ops.gated_delta_rule.associative import associative
from qwen35_jax.ops.gated_delta_rule.chunked import chunked
from qwen35_jax.ops.gated_delta_rule.grouped import group_state, grouped_inputs, ungroup_state
from qwen35_jax.ops.gated_delta_rule.recurrent import recurrent
from qwen35_jax.ops.segments import is_real, segment_index, segment_starts

Method = Literal["auto", "recurrent", "chunked", "associative"]


def gated_delta_rule(
    q: Float[Array, "batch time key_heads key_dim"],
    k: Float[Array, "batch time key_heads key_dim"],
    v: Float[Array, "batch time value_heads value_dim"],
    log_decay: Float[Array, "batch time value_heads"],
    beta: Float[Array, "batch time value_heads"],
    *,
    initial_state: Float[Array, "batch value_heads key_dim value_dim"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
    method: Method = "auto",
    chunk_size: int = 64,
) -> tuple[
    Float[Array, "batch time value_heads value_dim"], Float[Array, "batch value_heads key_dim value_dim"]
]:
    """Runs the recurrence S <- exp(g) S + k (beta (v - exp(g) S^T k))^T, o = S^T q over time.

    Value head h reads and writes with key head h // (value_heads / key_heads). All methods give the same values and
    gradients up to rounding.

    Args:
        q: queries, l2-normalised and scaled by key_dim**-0.5 by the caller.
        k: keys, l2-normalised by the caller.
        v: values.
        log_decay: natural logarithm g of the factor by which a token shrinks the state before its write; at most 0.
        beta: write strength, in [0, 1].
        initial_state: the state before the first token, zeros if None. float32 (float64 among float64 inputs).
        segment_ids: 0 marks padding, which changes no state and outputs zero; a token whose last real predecessor
            carries another id starts from a cleared state. `initial_state` belongs to the row's first segment.
            None: one segment, no padding.
        method: `recurrent` walks the tokens, `chunked` the chunks, `associative` composes the chunks as affine maps.
            `auto` is `recurrent` for one token, else `chunked`.
        chunk_size: tokens per chunk. Any time length is allowed; the last chunk is filled with no-ops.

    Returns:
        `(outputs, final_state)`, float32, or float64 when any input is float64.

    Raises:
        ValueError: a shape, the state's dtype or the method is not as described.
    """
    _check(q, k, v, log_decay, beta, initial_state, segment_ids, method, chunk_size)
    inputs = (q, k, v, log_decay, beta)
    dtype = jnp.float64 if any(x.dtype == jnp.float64 for x in inputs) else jnp.float32
    starts = segments = None
    if segment_ids is not None:
        real = is_real(segment_ids)
        inputs = tuple(jnp.where(jnp.expand_dims(real, range(2, x.ndim)), x, 0) for x in inputs)
        starts, segments = segment_starts(segment_ids), segment_index(segment_ids)
    q, k, v, log_decay, beta = (x.astype(dtype) for x in inputs)
    batch, time, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    if initial_state is None:
        initial_state = jnp.zeros((batch, value_heads, key_dim, value_dim), dtype)
    # A no-op, by which the state varies over the same mesh axes as v within `shard_map`, as loops ask for.
    initial_state = jnp.where(True, initial_state, v[:, 0, :, None, :])

    if method == "auto":
        method = "recurrent" if time == 1 else "chunked"
    if method == "recurrent":
        return recurrent(q, k, v, log_decay, beta, initial_state, starts)
    run = chunked if method == "chunked" else associative
    outputs, state = run(
        grouped_inputs(q, k, v, log_decay, beta),
        group_state(initial_state, key_heads),
        segments,
        min(chunk_size, time),
    )
    return (
        einops.rearrange(outputs, "b t h g v -> b t (h g) v"),
        ungroup_state(state, value_heads // key_heads),
    )


def _check(
    q: Float[Array, "..."],
    k: Float[Array, "..."],
    v: Float[Array, "..."],
    log_decay: Float[Array, "..."],
    beta: Float[Array, "..."],
    initial_state: Float[Array, "..."] | None,
    segment_ids: Int[Array, "..."] | None,
    method: str,
    chunk_size: int,
) -> None:
    if method not in get_args(Method):
        raise ValueError(f"method is {method!r}; expected one of {', '.join(get_args(Method))}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; expected at least 1")
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q has shape {q.shape} and v {v.shape}; expected [batch time heads dim] for both")
    batch, time, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    if key_heads == 0 or value_heads % key_heads:
        raise ValueError(
            f"v has {value_heads} heads and q {key_heads}; expected a multiple, so that each key head serves "
            "equally many value heads"
        )
    if time == 0:
        raise ValueError("q has no tokens (time is 0); expected at least one")
    expected = {
        "k": (k, (batch, time, key_heads, key_dim)),
        "v": (v, (batch, time, value_heads, value_dim)),
        "log_decay": (log_decay, (batch, time, value_heads)),
        "beta": (beta, (batch, time, value_heads)),
        "initial_state": (initial_state, (batch, value_heads, key_dim, value_dim)),
        "segment_ids": (segment_ids, (batch, time)),
    }
    for name, (array, shape) in expected.items():
        if array is not None and array.shape != shape:
            raise ValueError(
                f"{name} has shape {array.shape}; expected {shape} to go with q of shape {q.shape}"
            )
    if initial_state is not None:
        double = any(x.dtype == jnp.float64 for x in (q, k, v, log_decay, beta))
        state_dtype = jnp.dtype(jnp.float64 if double else jnp.float32)
        if initial_state.dtype != state_dtype:
            raise ValueError(
                f"initial_state is {initial_state.dtype}; expected {state_dtype}: the state is never kept in a "
                "narrower type"
            )
