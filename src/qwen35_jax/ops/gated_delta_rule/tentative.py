"""The gated delta rule over a few tokens of which it is not known yet how many will count.

What a token writes, k c^T with its correction c, does not depend on later tokens. So the outputs of all tokens and
their corrections are computed from the old state, and once it is known that the first n tokens count, the new state is

    S_n = exp(g_1 + ... + g_n) S + sum over i <= n of exp(g_(i+1) + ... + g_n) k_i c_i^T.

The state, by far the largest array, is read twice and written once, and no state in between exists. Symbols otherwise
as in `recurrent`. Corrections are solved for token by token, which is for a handful of them.
"""

from __future__ import annotations

import einops
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from qwen35_jax.ops.gated_delta_rule.products import product

State = Float[Array, "batch heads key_dim value_dim"]
PerHead = Float[Array, "batch time heads"]


def tentative_outputs(
    q: Float[Array, "batch time key_heads key_dim"],
    k: Float[Array, "batch time key_heads key_dim"],
    v: Float[Array, "batch time heads value_dim"],
    log_decay: PerHead,
    beta: PerHead,
    state: State,
) -> tuple[Float[Array, "batch time heads value_dim"], Float[Array, "batch time heads value_dim"]]:
    """What each token reads if all before it count, and its correction. Arguments as for `gated_delta_rule`.

    Returns:
        `(outputs, corrections)`, in the dtype of the state.
    """
    time = q.shape[1]
    q, k, v, log_decay, beta = (x.astype(state.dtype) for x in (q, k, v, log_decay, beta))
    q, k = (_per_value_head(x, v.shape[2]) for x in (q, k))
    v, log_decay, beta = jnp.moveaxis(v, 1, 2), jnp.moveaxis(log_decay, 1, 2), jnp.moveaxis(beta, 1, 2)

    from_start = jnp.exp(jnp.cumsum(log_decay, axis=-1))[..., None]
    both = product(jnp.concatenate([k, q], axis=2), state)
    recalled, read = from_start * both[:, :, :time], from_start * both[:, :, time:]
    between = _decay_between(log_decay)
    key_key, query_key = between * _dots(k, k), between * _dots(q, k)
    corrections: list[Array] = []
    outputs: list[Array] = []
    for i in range(time):
        known = sum(key_key[..., i, j, None] * corrections[j] for j in range(i))
        corrections.append(beta[..., i, None] * (v[:, :, i] - recalled[:, :, i] - known))
        new = sum(query_key[..., i, j, None] * corrections[j] for j in range(i + 1))
        outputs.append(read[:, :, i] + new)
    return jnp.stack(outputs, axis=1), jnp.stack(corrections, axis=1)


def state_after(
    state: State,
    k: Float[Array, "batch time key_heads key_dim"],
    corrections: Float[Array, "batch time heads value_dim"],
    log_decay: PerHead,
    counts: Bool[Array, "batch time"],
) -> State:
    """The state after the tokens that count, which are the leading ones of each row."""
    counted = jnp.where(counts[..., None], log_decay.astype(state.dtype), 0)
    after = jnp.cumsum(counted[:, ::-1], axis=1)[:, ::-1] - counted
    weight = jnp.where(counts[..., None], jnp.exp(after), 0)
    keys = einops.repeat(
        k.astype(state.dtype), "b t h d -> b t (h g) d", g=corrections.shape[2] // k.shape[2]
    )
    new = jnp.exp(counted.sum(axis=1))[..., None, None] * state
    for i in range(k.shape[1]):  # outer products: nothing of the state's size beside the sum
        weighted = weight[:, i, :, None] * keys[:, i]
        new = new + weighted[..., None] * corrections[:, i, :, None, :]
    return new


def _per_value_head(
    x: Float[Array, "batch time key_heads key_dim"], value_heads: int
) -> Float[Array, "batch heads time key_dim"]:
    return einops.repeat(x, "b t h d -> b (h g) t d", g=value_heads // x.shape[2])


def _dots(
    a: Float[Array, "batch heads time key_dim"], b: Float[Array, "batch heads time key_dim"]
) -> Float[Array, "batch heads time time"]:
    """Dot products of all pairs. As sums, which for a few tokens cost less than the start of a matrix product."""
    return (a[:, :, :, None] * b[:, :, None]).sum(axis=-1)


def _decay_between(log_decay: Float[Array, "batch heads time"]) -> Float[Array, "batch heads time time"]:
    """exp(g_(j+1) + ... + g_i) for j <= i, else 0.

    Every sum is formed by itself: differences of running sums lose the late ones after a strong decay.
    """
    time = log_decay.shape[-1]
    i, j, token = jnp.ogrid[:time, :time, :time]
    sums = jnp.where((j < token) & (token <= i), log_decay[..., None, None, :], 0).sum(axis=-1)
    return jnp.where((j <= i)[..., 0], jnp.exp(sums), 0)
