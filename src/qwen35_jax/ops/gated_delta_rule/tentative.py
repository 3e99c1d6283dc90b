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

from qwen35_jax.ops.gated_delta_rule.products import product, product_nt

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
    keys, queries = (_per_value_head(x, v.shape[2]) for x in (k, q))
    asking = jnp.concatenate([keys, queries], axis=2)
    from_state, from_keys = product(asking, state), product_nt(asking, keys)
    corrections: list[Array] = []
    outputs: list[Array] = []
    for i in range(time):
        recalled, read = jnp.zeros_like(v[:, i]), jnp.zeros_like(v[:, i])
        # Every sum of log decays is formed by itself, backwards from this token: differences of running sums lose the
        # late ones after a strong decay.
        since = jnp.zeros_like(log_decay[:, i])
        for j in reversed(range(i)):
            since = since + log_decay[:, j + 1]
            faded = jnp.exp(since)[..., None] * corrections[j]
            recalled = recalled + from_keys[:, :, i, j, None] * faded
            read = read + from_keys[:, :, time + i, j, None] * faded
        decay = jnp.exp(since + log_decay[:, 0])[..., None]
        recalled = recalled + decay * from_state[:, :, i]
        corrections.append(beta[:, i, :, None] * (v[:, i] - recalled))
        read = read + decay * from_state[:, :, time + i]
        outputs.append(read + from_keys[:, :, time + i, i, None] * corrections[i])
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
    keys = _per_value_head(k.astype(state.dtype), corrections.shape[2])
    since = jnp.zeros_like(counted[:, 0])
    new = jnp.zeros_like(state)
    for i in reversed(range(k.shape[1])):  # outer products: nothing of the state's size beside the sum
        weight = jnp.where(counts[:, i, None], jnp.exp(since), 0)
        new = new + (weight[..., None] * keys[:, :, i])[..., None] * corrections[:, i, :, None, :]
        since = since + counted[:, i]
    return jnp.exp(since)[..., None, None] * state + new


def _per_value_head(
    x: Float[Array, "batch time key_heads key_dim"], value_heads: int
) -> Float[Array, "batch heads time key_dim"]:
    return einops.repeat(x, "b t h d -> b (h g) t d", g=value_heads // x.shape[2])
