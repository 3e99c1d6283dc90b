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

from qwen35_jax.ops.gated_delta_rule.grouped import GroupedInputs, GroupedOutputs, GroupedState
from qwen35_jax.ops.gated_delta_rule.products import HIGHEST


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
    inputs: GroupedInputs, state: GroupedState, starts: Bool[Array, "batch time"] | None
) -> tuple[GroupedOutputs, GroupedState]:
    """Walks the tokens one by one.

    Args:
        inputs: tokens, padding already a no-op.
        state: the state before the first token.
        starts: true where the state is cleared before the token; None where that never happens.

    Returns:
        `(outputs, final_state)`.
    """

    def body(state, token):
        inputs, cut = token
        if cut is not None:
            state = jnp.where(jnp.expand_dims(cut, range(1, state.ndim)), 0, state)
        return token_step(state, *inputs)

    group = inputs.v.shape[3]
    by_head = einops.rearrange(state, "b h k (g v) -> b h k g v", g=group)
    if inputs.q.shape[1] == 1:  # decoding: no loop, one small program
        by_head, output = body(by_head, jax.tree.map(lambda x: x[:, 0], (inputs, starts)))
        outputs = output[:, None]
    else:
        time_first = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (inputs, starts))
        by_head, outputs = jax.lax.scan(body, by_head, time_first)
        outputs = jnp.moveaxis(outputs, 0, 1)
    return outputs, einops.rearrange(by_head, "b h k g v -> b h k (g v)")
