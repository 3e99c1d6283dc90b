"""Log-probabilities token by token, in blocks over time: the logits of a whole sequence never exist together.

A loss that is no sum over tokens, as one that compares whole answers, knows the weight of a token only when all of them
have been seen. So the logits are computed here without keeping any, and for the gradient once more: then every token
has its weight, and the gradient is that of a cross-entropy with these weights.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qwen35_jax.logical_axes import constrained, shards_in_program
from qwen35_jax.nn.parameter import compute_dtype_for_state
from qwen35_jax.ops.linear import linear
from qwen35_jax.training.cross_entropy import LOGITS_IN_A_BLOCK, cross_entropy


def log_probabilities(
    hidden: Float[Array, "batch time embed"],
    head_weight: Float[Array, "vocab embed"],
    targets: Int[Array, "batch time"],
    logits_in_a_block: int = LOGITS_IN_A_BLOCK,
) -> Float[Array, "batch time"]:
    """Logit of the target minus log Z, with Z = sum of exp(logits), of each token.

    Differentiable in `hidden` and `head_weight`. Logits and what follows are in float32 (float64 in a float64 model).
    A token whose gradient is 0, as that of padding, adds nothing to any gradient, whatever its values.

    Args:
        hidden: values after the final norm.
        head_weight: a row per token, cast to the dtype of `hidden`.
        targets: the token that should follow. Where nothing does, anything; so is the result there.
        logits_in_a_block: how many a device holds at a time; at least those of one position of each of its rows.
    """
    return _log_probabilities(hidden, head_weight, targets, logits_in_a_block)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _log_probabilities(
    hidden: Float[Array, "batch time embed"],
    head_weight: Float[Array, "vocab embed"],
    targets: Int[Array, "batch time"],
    logits_in_a_block: int,
) -> Array:
    batch, time, _ = hidden.shape
    vocabulary = head_weight.shape[0]
    devices = shards_in_program("batch", batch) * shards_in_program("vocab", vocabulary)
    blocks = -(-time // max(1, logits_in_a_block * devices // (batch * vocabulary)))
    block = -(-time // blocks)

    def cut(array: Array) -> Array:
        padded = jnp.pad(array, ((0, 0), (0, blocks * block - time)) + ((0, 0),) * (array.ndim - 2))
        return jnp.moveaxis(padded.reshape(batch, blocks, block, *array.shape[2:]), 1, 0)

    # Its residual width whole: gathered once, and not in every block.
    narrow = constrained(head_weight.astype(hidden.dtype), "vocab", "residual")
    found = jax.lax.map(
        lambda of_block: _of_block(of_block[0], narrow, of_block[1]), (cut(hidden), cut(targets))
    )
    return jnp.moveaxis(found, 0, 1).reshape(batch, -1)[:, :time]


def _of_block(
    hidden: Float[Array, "batch block embed"],
    head_weight: Float[Array, "vocab embed"],
    targets: Int[Array, "batch block"],
) -> Float[Array, "batch block"]:
    logits = linear(hidden, head_weight, dtype=compute_dtype_for_state(hidden.dtype))
    logits = constrained(logits, "batch", "time", "vocab")
    # A comparison, as each device of a vocabulary that is cut looks at its own part.
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    return jnp.sum(jnp.where(is_target, logits, 0), axis=-1) - jax.nn.logsumexp(logits, axis=-1)


_Residuals = tuple[Array, Array, Array]


def _forward(
    hidden: Array, head_weight: Array, targets: Array, logits_in_a_block: int
) -> tuple[Array, _Residuals]:
    found = log_probabilities(hidden, head_weight, targets, logits_in_a_block)
    return found, (hidden, head_weight, targets)


def _backward(
    logits_in_a_block: int, residuals: _Residuals, d_found: Float[Array, "batch time"]
) -> tuple[Array, Array, None]:
    hidden, head_weight, targets = residuals
    hidden = jnp.where(d_found[..., None] == 0, 0, hidden)  # infinity times 0 would be NaN

    def loss(hidden: Array, head_weight: Array) -> Array:
        sums = cross_entropy(hidden, head_weight, targets, -d_found, logits_in_a_block=logits_in_a_block)
        return sums.loss

    return (*jax.grad(loss, (0, 1))(hidden, head_weight), None)


_log_probabilities.defvjp(_forward, _backward)
