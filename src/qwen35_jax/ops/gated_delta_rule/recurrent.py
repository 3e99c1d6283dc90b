"""The gated delta rule token by token: the definition that every other method is tested against.

Symbols: per value head the state S is a matrix `[key_dim value_dim]`; one token with decay exp(g), key k, value v,
write strength beta and query q does

    S <- exp(g) S                   (decay first)
    S <- S + k (beta (v - S^T k))^T (replace what the key recalled by the new value, as far as beta says)
    o  = S^T q                      (read after the write)

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024), equation 10.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

HIGHEST = jax.lax.Precision.HIGHEST


def token_step(
    state: Float[Array, "batch key_heads key_dim group value_dim"],
    q: Float[Array, "batch key_heads key_dim"],
    k: Float[Array, "batch key_heads key_dim"],
    v: Float[Array, "batch key_heads group value_dim"],
    log_decay: Float[Array, "batch key_heads group"],
    beta: Float[Array, "batch key_heads group"],
) -> tuple[
    Float[Array, "batch key_heads key_dim group value_dim"], Float[Array, "batch key_heads group value_dim"]
]:
    """Moves the state over one token and reads it: returns `(new state, output)`."""
    state = state * jnp.exp(log_decay)[:, :, None, :, None]
    recalled = jnp.einsum("bkd,bkdre->bkre", k, state, precision=HIGHEST)
    correction = beta[..., None] * (v - recalled)
    state = state + k[..., None, None] * correction[:, :, None]
    return state, jnp.einsum("bkd,bkdre->bkre", q, state, precision=HIGHEST)


def recurrent(
    q: Float[Array, "batch time key_heads key_dim"],
    k: Float[Array, "batch time key_heads key_dim"],
    v: Float[Array, "batch time key_heads group value_dim"],
    log_decay: Float[Array, "batch time key_heads group"],
    beta: Float[Array, "batch time key_heads group"],
    state: Float[Array, "batch key_heads key_dim values"],
    starts: Bool[Array, "batch time"] | None,
) -> tuple[
    Float[Array, "batch time key_heads group value_dim"],
    Float[Array, "batch key_heads key_dim values"],
]:
    """Walks the tokens one by one.

    Args:
        q, k, v, log_decay, beta: inputs of one dtype, value heads grouped by their key head, padding already a no-op.
        state: the state before the first token.
        starts: true where the state is cleared before the token; None where that never happens.

    Returns:
        `(outputs, final_state)`.
    """

    def body(state, token):
        *inputs, cut = token
        if cut is not None:
            state = jnp.where(cut[:, None, None, None, None], 0, state)
        return token_step(state, *inputs)

    by_head = state.reshape(*state.shape[:3], *v.shape[3:])
    if q.shape[1] == 1:  # decoding: no loop, one small program
        token = [x[:, 0] for x in (q, k, v, log_decay, beta)]
        by_head, output = body(by_head, (*token, None if starts is None else starts[:, 0]))
        return output[:, None], by_head.reshape(state.shape)
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, log_decay, beta, starts))
    by_head, outputs = jax.lax.scan(body, by_head, tokens)
    return jnp.moveaxis(outputs, 0, 1), by_head.reshape(state.shape)
