"""Layers that remember, over a sequence that is cut across devices: what passes from one part to the next.

The functions ending in `of_part` run inside `jax.shard_map` over the mesh axis of the parts, each device with
its own; `over_parts` makes one of them run on whole arrays, within a program under `jax.set_mesh`. A part is first
computed as if nothing stood before it; what did is small, and is added afterwards:

- the convolution needs its last few inputs;
- the gated delta rule needs the state, and a part is an affine map of it (S -> A S + B). The maps of all parts are
  gathered, 2 key_dim value_dim numbers a head whatever the length, and each device composes those before its own;
- attention needs the keys and values of the parts before, and gathers all of them.

A document that begins within a part, or with it, cuts all of these as it does within one device.

Source: the composition of affine maps is that of `gated_delta_rule.associative`, over devices instead of chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import einops
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Shaped

from qwen35_jax.errors import ConfigError
from qwen35_jax.ops.attention import attention
from qwen35_jax.ops.causal_conv import causal_conv
from qwen35_jax.ops.gated_delta_rule import gated_delta_rule
from qwen35_jax.ops.gated_delta_rule.products import HIGHEST
from qwen35_jax.ops.segments import is_real, segment_starts


class Parts(NamedTuple):
    """What every device knows of the documents in all parts, [part batch].

    Attributes:
        own: this device's part.
        goes_on: whether a part's first token is of the document that was the last before it.
        is_cut: whether a document begins within the part, after its first token.
        is_empty: whether it holds padding alone.
    """

    own: Int[Array, ""]
    goes_on: Bool[Array, "part batch"]
    is_cut: Bool[Array, "part batch"]
    is_empty: Bool[Array, "part batch"]


def parts_of(segment_ids: Int[Array, "batch time"], axis: str) -> Parts:
    """Reads the documents of a part, and tells the other devices of them.

    Args:
        segment_ids: of this device's part, see `ops.segments`.
        axis: the mesh axis of the parts.
    """
    real = is_real(segment_ids)
    row, time = jnp.arange(segment_ids.shape[0]), segment_ids.shape[1]
    first = segment_ids[row, jnp.argmax(real, axis=1)]
    last = segment_ids[row, time - 1 - jnp.argmax(real[:, ::-1], axis=1)]
    told = jnp.stack([first, last, segment_starts(segment_ids).any(axis=1), ~real.any(axis=1)])
    first, last, is_cut, is_empty = jnp.moveaxis(jax.lax.all_gather(told, axis), 1, 0)

    def walk(
        before: Int[Array, "batch"], part: tuple[Array, Array, Array]
    ) -> tuple[Int[Array, "batch"], Bool[Array, "batch"]]:
        first, last, is_empty = part
        return jnp.where(is_empty, before, last), first == before

    _, goes_on = jax.lax.scan(walk, jnp.zeros_like(first[0]), (first, last, is_empty.astype(bool)))
    return Parts(jax.lax.axis_index(axis), goes_on, is_cut.astype(bool), is_empty.astype(bool))


def causal_conv_of_part(
    x: Float[Array, "batch time *channels"],
    weight: Float[Array, "kernel *channels"],
    segment_ids: Int[Array, "batch time"],
    axis: str,
) -> Float[Array, "batch time *channels"]:
    """`causal_conv` of this device's part of a sequence. Arguments as there, and those of `parts_of`."""
    parts = parts_of(segment_ids, axis)
    reach = weight.shape[0] - 1
    _, own = causal_conv(x, weight, segment_ids=segment_ids)
    known = jnp.minimum(is_real(segment_ids).sum(axis=1), reach)
    tails, counts = jax.lax.all_gather((own, known), axis)

    def walk(window: Array, part: tuple[Array, Array, Array, Array]) -> tuple[Array, Array]:
        tail, count, goes_on, is_cut = part
        entering = jnp.where(_to_rank(goes_on, window), window, 0)
        # What was known moves out as far as new inputs move in.
        moved = jax.vmap(
            lambda row, by: jax.lax.dynamic_slice_in_dim(jnp.pad(row, _behind(row, reach)), by, reach)
        )(entering, count)
        after = tail + jnp.where(_to_rank(is_cut, window), 0, moved)
        return jnp.where(_to_rank(count == 0, window), window, after), entering

    _, entering = jax.lax.scan(walk, jnp.zeros_like(own), (tails, counts, parts.goes_on, parts.is_cut))
    window = jax.lax.dynamic_index_in_dim(entering, parts.own, keepdims=False)
    return causal_conv(x, weight, window=window, segment_ids=segment_ids)[0]


def gated_delta_rule_of_part(
    q: Float[Array, "batch time key_heads key_dim"],
    k: Float[Array, "batch time key_heads key_dim"],
    v: Float[Array, "batch time value_heads value_dim"],
    log_decay: Float[Array, "batch time value_heads"],
    beta: Float[Array, "batch time value_heads"],
    segment_ids: Int[Array, "batch time"],
    axis: str,
) -> Float[Array, "batch time value_heads value_dim"]:
    """`gated_delta_rule` of this device's part of a sequence, from an empty state before the first part.

    The part's map is found by the rule itself, beside its outputs: value channels that write nothing into a state that
    begins as the identity hold the transition, and what they read is what a state from before would add. So the rule
    runs once, with key_dim more value channels. Other arguments are those of `parts_of`.
    """
    parts = parts_of(segment_ids, axis)
    batch, _, value_heads, value_dim = v.shape
    key_dim = q.shape[-1]
    dtype = jnp.promote_types(v.dtype, jnp.float32)
    silent = jnp.zeros((*v.shape[:3], key_dim), v.dtype)
    identity = jnp.broadcast_to(jnp.eye(key_dim, dtype=dtype), (batch, value_heads, key_dim, key_dim))
    nothing = jnp.zeros((batch, value_heads, key_dim, value_dim), dtype)
    outputs, state = gated_delta_rule(
        q,
        k,
        jnp.concatenate([v, silent], axis=-1),
        log_decay,
        beta,
        initial_state=jnp.concatenate([nothing, identity], axis=-1),
        segment_ids=segment_ids,
    )
    own_outputs, reads = outputs[..., :value_dim], outputs[..., value_dim:]
    maps = jax.lax.all_gather(state, axis)

    def walk(state: Array, part: tuple[Array, Array]) -> tuple[Array, Array]:
        of_part, goes_on = part
        entering = jnp.where(_to_rank(goes_on, state), state, 0)
        write, transition = of_part[..., :value_dim], of_part[..., value_dim:]
        return jnp.matmul(transition, entering, precision=HIGHEST) + write, entering

    _, entering = jax.lax.scan(
        walk, jnp.zeros_like(maps[0, ..., :value_dim]), (maps, parts.goes_on | parts.is_empty)
    )
    # A part of padding passes the state on as it is, and is asked by nobody.
    before = jax.lax.dynamic_index_in_dim(entering, parts.own, keepdims=False)
    return own_outputs + jnp.einsum("bthk,bhkv->bthv", reads, before, precision=HIGHEST)


def attention_of_part(
    q: Float[Array, "batch time heads head_dim"],
    k: Float[Array, "batch time kv_heads head_dim"],
    v: Float[Array, "batch time kv_heads head_dim"],
    segment_ids: Int[Array, "batch time"],
    axis: str,
) -> Float[Array, "batch time heads head_dim"]:
    """`attention` of this device's queries, over the keys and values of all parts."""

    def whole(part: Array) -> Array:
        return einops.rearrange(jax.lax.all_gather(part, axis), "part b t ... -> b (part t) ...")

    start = jax.lax.axis_index(axis) * q.shape[1]
    return attention(q, whole(k), whole(v), segment_ids=whole(segment_ids), first_query=start)


def over_parts(
    of_part: Callable[..., Shaped[Array, "batch time ..."]],
    axis: str,
    *arguments: Shaped[Array, "batch time ..."],
    same: tuple[Shaped[Array, "..."], ...] = (),
) -> Shaped[Array, "batch time ..."]:
    """Runs a function of this file over all parts.

    Args:
        of_part: takes the arguments, and the axis.
        axis: of the mesh, over which time is cut. Other axes are left to the compiler.
        arguments: arrays [batch time ...], the documents last.
        same: arguments without time, which follow the first one.

    Raises:
        ConfigError: the time does not divide over the devices.
    """
    first, *others = arguments
    devices = jax.sharding.get_abstract_mesh().shape[axis]
    if first.shape[1] % devices:
        raise ConfigError(
            f"mesh: {first.shape[1]} tokens of time do not divide over {devices} devices of mesh axis '{axis}'; "
            f"choose a length that is a multiple of {devices}"
        )
    cut, whole = PartitionSpec(None, axis), PartitionSpec()
    return jax.shard_map(
        lambda *arguments: of_part(*arguments, axis),
        in_specs=(cut, *(whole for _ in same), *(cut for _ in others)),
        out_specs=cut,
        axis_names={axis},
    )(first, *same, *others)


def _behind(row: Array, count: int) -> tuple[tuple[int, int], ...]:
    return ((0, count),) + ((0, 0),) * (row.ndim - 1)


def _to_rank(mask: Bool[Array, "batch"], like: Array) -> Array:
    return mask.reshape(mask.shape + (1,) * (like.ndim - 1))
