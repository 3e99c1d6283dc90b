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
from jaxtyping import Array, Bool, Float, Int

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
    keys, queries = (_per_value_head(x.astype(state.dtype), v.shape[2]) for x in (k, q))
    v, log_decay, beta = (jnp.swapaxes(x.astype(state.dtype), 1, 2) for x in (v, log_decay, beta))
    time = v.shape[2]
    asking = jnp.concatenate([keys, queries], axis=2)
    recalled, read = jnp.split(product(asking, state), [time], axis=2)
    of_keys, of_queries = jnp.split(product_nt(asking, keys), [time], axis=2)

    token, earlier = jnp.arange(time)[:, None], jnp.arange(time)
    faded = jnp.where(token >= earlier, jnp.exp(_sums(log_decay, after=earlier, until=token)), 0)
    decay = jnp.exp(_sums(log_decay, after=-1, until=token))
    overlap = jnp.where(token > earlier, beta[..., None] * faded * of_keys, 0)
    wanted = beta[..., None] * (v - decay * recalled)
    corrections: list[Array] = []
    for i in range(time):
        others = [overlap[:, :, i, j, None] * corrections[j] for j in range(i)]
        corrections.append(wanted[:, :, i] - sum(others, jnp.zeros_like(wanted[:, :, i])))
    corrected = jnp.stack(corrections, axis=2)
    # A sum over a handful of tokens, in one piece with the rest: as a product it would be a call of its own.
    written = jnp.sum((faded * of_queries)[..., None] * corrected[:, :, None], axis=3)
    outputs = decay * read + written
    return jnp.swapaxes(outputs, 1, 2), jnp.swapaxes(corrected, 1, 2)


def state_after(
    state: State,
    k: Float[Array, "batch time key_heads key_dim"],
    corrections: Float[Array, "batch time heads value_dim"],
    log_decay: PerHead,
    counts: Bool[Array, "batch time"],
) -> State:
    """The state after the tokens that count, which are the leading ones of each row."""
    counted = jnp.where(counts[..., None], log_decay.astype(state.dtype), 0)
    counted = jnp.swapaxes(counted, 1, 2)
    weight = jnp.exp(_sums(counted, after=jnp.arange(counts.shape[1])[:, None], until=counts.shape[1]))
    weight = jnp.where(counts[:, None, :, None], weight, 0)
    keys = weight * _per_value_head(k.astype(state.dtype), corrections.shape[2])
    new = jnp.zeros_like(state)
    for i in range(k.shape[1]):  # outer products: nothing of the state's size beside the sum
        new = new + keys[:, :, i, :, None] * corrections[:, i, :, None, :]
    return jnp.exp(counted.sum(axis=2))[..., None, None] * state + new


def _sums(
    log_decay: Float[Array, "batch heads time"],
    *,
    after: Int[Array, "..."] | int,
    until: Int[Array, "..."] | int,
) -> Float[Array, "batch heads ..."]:
    """For every pair of tokens, the sum of the log decays after one and until the other.

    Every sum is formed by itself: differences of running sums lose the late ones after a strong decay.
    """
    token = jnp.arange(log_decay.shape[-1])
    within = (token > jnp.asarray(after)[..., None]) & (token <= jnp.asarray(until)[..., None])
    shaped = log_decay.reshape(*log_decay.shape[:2], *(1,) * (within.ndim - 1), -1)
    return jnp.where(within, shaped, 0).sum(axis=-1)


def _per_value_head(
    x: Float[Array, "batch time key_heads key_dim"], value_heads: int
) -> Float[Array, "batch heads time key_dim"]:
    return einops.repeat(x, "b t h d -> b (h g) t d", g=value_heads // x.shape[2])
