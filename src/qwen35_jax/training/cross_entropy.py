"""Cross-entropy of the output head in blocks over time: the logits of a whole sequence never exist together.

With a vocabulary of 248,320 the float32 logits of 8,192 tokens take 7.6 GiB, and an ordinary gradient keeps them twice.
Here a block's logits live until its gradients are known, which is within the forward pass: the loss is a sum over
tokens, so the gradient of a block needs nothing from later ones. That is three products with the head for a loss and
its gradients, the least there is; computing the logits again in the backward pass would be a fourth.

Source: the idea is that of Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training" (2024), section 3.2.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qwen35_jax.logical_axes import constrained
from qwen35_jax.nn.parameter import compute_dtype_for_state
from qwen35_jax.ops.linear import linear
from qwen35_jax.ops.precision import product_precision

LOGITS_IN_A_BLOCK = 1 << 27
"""Logits that are held at a time: half a GiB in float32."""


class TokenSums(NamedTuple):
    """Weighted sums over the tokens of a batch.

    Attributes:
        loss: what is minimized: `cross_entropy` and the penalty on the normalizer.
        cross_entropy: minus the log-probabilities of the targets, in nats.
        correct: one for each target that has the largest logit.
    """

    loss: Float[Array, ""]
    cross_entropy: Float[Array, ""]
    correct: Float[Array, ""]


def cross_entropy(
    hidden: Float[Array, "batch time embed"],
    head_weight: Float[Array, "vocab embed"],
    targets: Int[Array, "batch time"],
    weights: Float[Array, "batch time"],
    *,
    z_loss: float = 0.0,
    logits_in_a_block: int = LOGITS_IN_A_BLOCK,
) -> TokenSums:
    """Sums over all tokens of weight * (log Z - logit of the target + z_loss (log Z)^2), with Z = sum of exp(logits).

    Differentiable in `hidden` and `head_weight`, through `loss` alone. Both get the gradients of the plain formula, up
    to rounding. Logits, softmax and sums are in float32 (float64 in a float64 model); the gradient of the logits is
    rounded to the dtype of `hidden` for its two products, as in any model of that dtype.

    Args:
        hidden: values after the final norm.
        head_weight: a row per token, cast to the dtype of `hidden`.
        targets: the token that should follow. Anything where the weight is 0.
        weights: of each token in the sums; 0 where nothing is to be learned.
        z_loss: weight of the squared log normalizer, which keeps logits from drifting (Chowdhery et al., "PaLM", 2022,
            section 5).
        logits_in_a_block: how many are held at a time; at least those of one position of every row.
    """
    batch, time, _ = hidden.shape
    block = min(time, max(1, logits_in_a_block // (batch * head_weight.shape[0])))
    blocks = -(-time // block)
    fill = blocks * block - time

    def cut(array: Array) -> Array:
        padded = jnp.pad(array, ((0, 0), (0, fill)) + ((0, 0),) * (array.ndim - 2))
        return jnp.moveaxis(padded.reshape(batch, blocks, block, *array.shape[2:]), 1, 0)

    weights = weights.astype(compute_dtype_for_state(hidden.dtype))
    return _sums_of_blocks(cut(hidden), head_weight, cut(targets), cut(weights), z_loss)


Blocks = Float[Array, "blocks batch block embed"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _sums_of_blocks(
    hidden: Blocks,
    head_weight: Float[Array, "vocab embed"],
    targets: Int[Array, "blocks batch block"],
    weights: Float[Array, "blocks batch block"],
    z_loss: float,
) -> TokenSums:
    def add(sums: TokenSums, of_block: tuple[Array, Array, Array]) -> tuple[TokenSums, None]:
        hidden, targets, weights = of_block
        block_sums, _ = _sums_of_block(_logits(hidden, head_weight), targets, weights, z_loss)
        return jax.tree.map(jnp.add, sums, block_sums), None

    return jax.lax.scan(add, _nothing(weights.dtype), (hidden, targets, weights))[0]


def _forward(
    hidden: Blocks, head_weight: Array, targets: Array, weights: Array, z_loss: float
) -> tuple[TokenSums, tuple[Array, Array, Array, Array]]:
    products = {"precision": product_precision(hidden.dtype), "preferred_element_type": weights.dtype}
    narrow = head_weight.astype(hidden.dtype)

    def add(
        carry: tuple[TokenSums, Array], of_block: tuple[Array, Array, Array]
    ) -> tuple[tuple[TokenSums, Array], Array]:
        sums, d_weight = carry
        hidden, targets, weights = of_block
        block_sums, d_logits = _sums_of_block(_logits(hidden, narrow), targets, weights, z_loss)
        d_logits = d_logits.astype(hidden.dtype)
        d_hidden = jnp.einsum("btv,ve->bte", d_logits, narrow, **products).astype(hidden.dtype)
        d_weight = d_weight + jnp.einsum("btv,bte->ve", d_logits, hidden, **products)
        return (jax.tree.map(jnp.add, sums, block_sums), d_weight), d_hidden

    empty = _nothing(weights.dtype), jnp.zeros(head_weight.shape, weights.dtype)
    (sums, d_weight), d_hidden = jax.lax.scan(add, empty, (hidden, targets, weights))
    # The dtypes of what the gradients are for go along as empty arrays: residuals are arrays.
    return sums, (d_hidden, d_weight, jnp.zeros((0,), head_weight.dtype), jnp.zeros_like(weights))


def _backward(
    z_loss: float, residuals: tuple[Array, Array, Array, Array], d_sums: TokenSums
) -> tuple[Array, Array, None, Array]:
    d_hidden, d_weight, like_weight, no_weights = residuals
    scaled = d_sums.loss
    return (
        d_hidden * scaled.astype(d_hidden.dtype),
        (d_weight * scaled).astype(like_weight.dtype),
        None,
        no_weights,
    )


_sums_of_blocks.defvjp(_forward, _backward)


def _logits(hidden: Float[Array, "batch block embed"], head_weight: Array) -> Array:
    logits = linear(hidden, head_weight, dtype=compute_dtype_for_state(hidden.dtype))
    return constrained(logits, "batch", "time", "vocab")


def _sums_of_block(
    logits: Float[Array, "batch block vocab"],
    targets: Int[Array, "batch block"],
    weights: Float[Array, "batch block"],
    z_loss: float,
) -> tuple[TokenSums, Float[Array, "batch block vocab"]]:
    """The sums of a block, and the gradient of its loss in the logits."""
    # A comparison, and not a lookup: it costs nothing beside the rest, and where the vocabulary is cut over devices
    # each of them looks at its own part.
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    of_target = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    exponentials = jnp.exp(logits - largest)
    normalizer = jnp.sum(exponentials, axis=-1, keepdims=True)
    log_normalizer = (jnp.log(normalizer) + largest)[..., 0]
    entropy = log_normalizer - of_target
    loss = entropy + z_loss * log_normalizer**2
    sums = TokenSums(
        loss=_weighted_sum(loss, weights),
        cross_entropy=_weighted_sum(entropy, weights),
        correct=_weighted_sum((of_target == largest[..., 0]).astype(weights.dtype), weights),
    )
    d_normalizer = weights * (1 + 2 * z_loss * log_normalizer)
    d_logits = exponentials * (d_normalizer[..., None] / normalizer)
    d_logits = d_logits - jnp.where(is_target, weights[..., None], 0)
    return sums, jnp.where(weights[..., None] == 0, 0, d_logits)


def _weighted_sum(values: Float[Array, "batch block"], weights: Float[Array, "batch block"]) -> Array:
    """A token of weight 0 adds nothing, whatever its value."""
    return jnp.sum(jnp.where(weights == 0, 0, weights * values))


def _nothing(dtype: jnp.dtype) -> TokenSums:
    return TokenSums(*(jnp.zeros((), dtype) for _ in TokenSums._fields))
