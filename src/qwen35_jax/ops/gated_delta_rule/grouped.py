"""The inputs of the rule with the value heads of a key head beside each other, as all methods take them."""

from typing import NamedTuple

import einops
from jaxtyping import Array, Float


class GroupedInputs(NamedTuple):
    """Tokens of one dtype; `group` counts the value heads of a key head. Padding is a no-op already: all zeros."""

    q: Float[Array, "batch time key_heads key_dim"]
    k: Float[Array, "batch time key_heads key_dim"]
    v: Float[Array, "batch time key_heads group value_dim"]
    log_decay: Float[Array, "batch time key_heads group"]
    beta: Float[Array, "batch time key_heads group"]


def grouped_inputs(
    q: Float[Array, "batch time key_heads key_dim"],
    k: Float[Array, "batch time key_heads key_dim"],
    v: Float[Array, "batch time value_heads value_dim"],
    log_decay: Float[Array, "batch time value_heads"],
    beta: Float[Array, "batch time value_heads"],
) -> GroupedInputs:
    """Inputs with the value heads of each key head as an axis of their own."""
    heads = q.shape[2]
    v = einops.rearrange(v, "b t (h g) v -> b t h g v", h=heads)
    log_decay, beta = (einops.rearrange(x, "b t (h g) -> b t h g", h=heads) for x in (log_decay, beta))
    return GroupedInputs(q, k, v, log_decay, beta)


GroupedState = Float[Array, "batch key_heads key_dim values"]
"""The states of a key head's value heads side by side, values = group * value_dim: one product serves them all."""

GroupedOutputs = Float[Array, "batch time key_heads group value_dim"]


def group_state(state: Float[Array, "batch value_heads key_dim value_dim"], key_heads: int) -> GroupedState:
    """The states of each key head's value heads side by side."""
    return einops.rearrange(state, "b (h g) k v -> b h k (g v)", h=key_heads)


def ungroup_state(state: GroupedState, group: int) -> Float[Array, "batch value_heads key_dim value_dim"]:
    """Undoes `group_state`."""
    return einops.rearrange(state, "b h k (g v) -> b (h g) k v", g=group)
