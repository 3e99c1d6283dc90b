"""The gated delta rule token by token: the definition that every other method is tested against.

Symbols: per value head the state S is a matrix `[key_dim value_dim]`; one token with decay exp(g), key k, value v,
write strength beta and query q does

    S <- exp(g) S                   (decay first)
    S <- S + k (beta (v - S^T k))^T (replace what the key recalled by the new value, as far as beta says)
    o  = S^T q                      (read after the write)

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024), equation 10.
"""

import einops
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from qwen35_jax.ops.gated_delta_rule.products import product, row_dots

State = Float[Array, "batch heads key_dim value_dim"]


def token_step(
    state: State,
    q: Float[Array, "batch heads key_dim"],
    k: Float[Array, "batch heads key_dim"],
    v: Float[Array, "batch heads value_dim"],
    log_decay: Float[Array, "batch heads"],
    beta: Float[Array, "batch heads"],
) -> tuple[State, Float[Array, "batch heads value_dim"]]:
    """Moves the state over one token and reads it: returns `(new state, output)`.

    Key and query ask the old state together, and the output follows from o = exp(g) S^T q + (k . q) correction. So
    the state, by far the largest array, is read twice and written once, and nothing else of its size exists.
    """
    decay = jnp.exp(log_decay)[..., None]
    recalled, read = jnp.moveaxis(product(jnp.stack([k, q], axis=2), state), 2, 0)
    correction = beta[..., None] * (v - decay * recalled)
    output = decay * read + row_dots(k, q)[..., None] * correction
    return decay[..., None] * state + k[..., None] * correction[:, :, None], output


def recurrent(
    q: Float[Array, "batch time key_heads key_dim"],
    k: Float[Array, "batch time key_heads key_dim"],
    v: Float[Array, "batch time heads value_dim"],
    log_decay: Float[Array, "batch time heads"],
    beta: Float[Array, "batch time heads"],
    state: State,
    starts: Bool[Array, "batch time"] | None,
) -> tuple[Float[Array, "batch time heads value_dim"], State]:
    """Walks the tokens one by one.

    Args:
        q, k, v, log_decay, beta: of tokens of one dtype; padding is a no-op already, all zeros.
        state: the state before the first token.
        starts: true where the state is cleared before the token; None where that never happens.

    Returns:
        `(outputs, final_state)`.
    """
    group = v.shape[2] // k.shape[2]
    q, k = (einops.repeat(x, "b t h d -> b t (h g) d", g=group) for x in (q, k))
    tokens = ((q, k, v, log_decay, beta), starts)

    def body(state, token):
        inputs, cut = token
        if cut is not None:
            state = jnp.where(cut[:, None, None, None], 0, state)
        return token_step(state, *inputs)

    if q.shape[1] == 1:  # decoding: no loop, one small program
        state, output = body(state, jax.tree.map(lambda x: x[:, 0], tokens))
        return output[:, None], state
    state, outputs = jax.lax.scan(body, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens))
    return jnp.moveaxis(outputs, 0, 1), state
