"""Cross-entropy of the output head in blocks over time: the logits of a whole sequence never exist together.

With a vocabulary of 248,320 the float32 logits of 8,192 tokens take 7.6 GiB, and an ordinary gradient keeps them twice.
Here a block's logits live until its gradients are known, which is within the forward pass: the loss is a sum over
tokens, so the gradient of a block needs nothing from later ones. That is three products with the head for a loss and
its gradients, the least there is; computing the logits again in the backward pass would be a fourth.

Within a block the vocabulary is walked in pieces, twice: once for the logits, with the softmax's normalizer on the way,
and once for what is made of them. A piece is small enough to stay in a processor's cache between its product and what
follows; on a CPU of two cores that makes 512 tokens' loss and gradients a tenth faster than the vocabulary as one.

Source: the idea is that of Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training" (2024), section 3.2.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from qwen35_jax.logical_axes import constrained, over_devices, shards_in_program
from qwen35_jax.nn.parameter import compute_dtype_for_state
from qwen35_jax.ops.linear import linear
from qwen35_jax.ops.precision import product_precision

LOGITS_IN_A_BLOCK = 1 << 27
"""Logits that a device holds at a time: half a GiB in float32."""

LOGITS_IN_A_PIECE = 1 << 22
"""Logits of a piece of the vocabulary: 16 MiB in float32."""


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
    logits_in_a_piece: int = LOGITS_IN_A_PIECE,
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
        logits_in_a_block: how many a device holds at a time; at least those of one position of each of its rows.
        logits_in_a_piece: how many of a block are computed at a time, as far as equal pieces of the vocabulary allow.
            Over several devices the vocabulary is one piece: it may be cut over them.
    """
    batch, time, _ = hidden.shape
    vocabulary = head_weight.shape[0]
    devices = shards_in_program("batch", batch) * shards_in_program("vocab", vocabulary)
    blocks = -(-time // max(1, logits_in_a_block * devices // (batch * vocabulary)))
    block = -(-time // blocks)
    fill = blocks * block - time
    pieces = 1 if over_devices() else _pieces(vocabulary, logits_in_a_piece // (batch * block))

    def cut(array: Array) -> Array:
        padded = jnp.pad(array, ((0, 0), (0, fill)) + ((0, 0),) * (array.ndim - 2))
        return jnp.moveaxis(padded.reshape(batch, blocks, block, *array.shape[2:]), 1, 0)

    weights = weights.astype(compute_dtype_for_state(hidden.dtype))
    return _sums_of_blocks(cut(hidden), head_weight, cut(targets), cut(weights), z_loss, pieces)


def _pieces(vocabulary: int, largest: int) -> int:
    """Into how many equal parts a vocabulary is cut: parts of at most `largest`, and one where none come near that."""
    fewest = -(-vocabulary // max(1, largest))
    fitting = (count for count in range(fewest, 4 * fewest + 1) if vocabulary % count == 0)
    return next(fitting, 1)


class _Softmax(NamedTuple):
    """What is known of a block's softmax after some pieces of the vocabulary; infinities count as values.

    Attributes:
        largest: logit.
        normalizer: sum of exp(logit - largest).
        of_target: logit of the target, 0 before its piece.
    """

    largest: Float[Array, "batch block"]
    normalizer: Float[Array, "batch block"]
    of_target: Float[Array, "batch block"]


Blocks = Float[Array, "blocks batch block embed"]
Head = Float[Array, "pieces part embed"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _sums_of_blocks(
    hidden: Blocks,
    head_weight: Float[Array, "vocab embed"],
    targets: Int[Array, "blocks batch block"],
    weights: Float[Array, "blocks batch block"],
    z_loss: float,
    pieces: int,
) -> TokenSums:
    head = _in_pieces(head_weight, hidden.dtype, pieces)

    def add(sums: TokenSums, of_block: tuple[Array, Array, Array]) -> tuple[TokenSums, None]:
        hidden, targets, weights = of_block
        softmax, _ = _softmax(hidden, head, targets, keep_logits=False)
        return jax.tree.map(jnp.add, sums, _sums(softmax, weights, z_loss)), None

    return jax.lax.scan(add, _nothing(weights.dtype), (hidden, targets, weights))[0]


def _forward(
    hidden: Blocks, head_weight: Array, targets: Array, weights: Array, z_loss: float, pieces: int
) -> tuple[TokenSums, tuple[Array, Array, Array, Array]]:
    head = _in_pieces(head_weight, hidden.dtype, pieces)

    def add(
        carry: tuple[TokenSums, Head], of_block: tuple[Array, Array, Array]
    ) -> tuple[tuple[TokenSums, Head], Array]:
        sums, d_head = carry
        hidden, targets, weights = of_block
        softmax, logits = _softmax(hidden, head, targets, keep_logits=True)
        assert logits is not None
        sums = jax.tree.map(jnp.add, sums, _sums(softmax, weights, z_loss))
        d_hidden, d_head = _gradients(hidden, head, targets, weights, z_loss, softmax, logits, d_head)
        return (sums, d_head), d_hidden

    empty = _nothing(weights.dtype), jnp.zeros(head.shape, weights.dtype)
    (sums, d_head), d_hidden = jax.lax.scan(add, empty, (hidden, targets, weights))
    # The dtypes of what the gradients are for go along as empty arrays: residuals are arrays.
    d_weight = d_head.reshape(head_weight.shape)
    return sums, (d_hidden, d_weight, jnp.zeros((0,), head_weight.dtype), jnp.zeros_like(weights))


def _backward(
    z_loss: float, pieces: int, residuals: tuple[Array, Array, Array, Array], d_sums: TokenSums
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


def _in_pieces(head_weight: Float[Array, "vocab embed"], dtype: jnp.dtype, pieces: int) -> Head:
    """The head as the products of all blocks use it: its residual width whole, gathered once and not in every block."""
    gathered = constrained(head_weight.astype(dtype), "vocab", "residual")
    return gathered.reshape(pieces, -1, gathered.shape[-1])


def _softmax(
    hidden: Float[Array, "batch block embed"],
    head: Head,
    targets: Int[Array, "batch block"],
    *,
    keep_logits: bool,
) -> tuple[_Softmax, Float[Array, "pieces batch block part"] | None]:
    """Walks the pieces: what is needed of a block's logits, and if asked for the logits themselves."""

    def add(found: _Softmax, piece: tuple[Array, Array]) -> tuple[_Softmax, Array | None]:
        number, rows = piece
        logits = _logits(hidden, rows)
        of_target = jnp.sum(jnp.where(_is_target(targets, number, rows), logits, 0), axis=-1)
        largest = jnp.maximum(found.largest, jnp.max(logits, axis=-1))
        normalizer = jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1)
        # Before the first piece the largest is -infinity, and stays it where all logits are.
        earlier = jnp.where(found.normalizer == 0, 0, found.normalizer * jnp.exp(found.largest - largest))
        found = _Softmax(largest, earlier + normalizer, found.of_target + of_target)
        return found, logits if keep_logits else None

    zeros = jnp.zeros(targets.shape, compute_dtype_for_state(hidden.dtype))
    nothing = _Softmax(jnp.full_like(zeros, -jnp.inf), zeros, zeros)
    return jax.lax.scan(add, nothing, (jnp.arange(len(head)), head), unroll=len(head) == 1)


def _gradients(
    hidden: Float[Array, "batch block embed"],
    head: Head,
    targets: Int[Array, "batch block"],
    weights: Float[Array, "batch block"],
    z_loss: float,
    softmax: _Softmax,
    logits: Float[Array, "pieces batch block part"],
    d_head: Head,
) -> tuple[Float[Array, "batch block embed"], Head]:
    """Walks the pieces: the gradient in a block's hidden values, and `d_head` with what the block adds to it."""
    products = {"precision": product_precision(hidden.dtype), "preferred_element_type": weights.dtype}
    d_normalizer = weights * (1 + 2 * z_loss * _log_normalizer(softmax))

    def add(carry: tuple[Array, Head], piece: tuple[Array, Array, Array]) -> tuple[tuple[Array, Head], None]:
        d_hidden, d_head = carry
        number, rows, logits = piece
        exponentials = jnp.exp(logits - softmax.largest[..., None])
        d_logits = exponentials * (d_normalizer / softmax.normalizer)[..., None]
        d_logits = d_logits - jnp.where(_is_target(targets, number, rows), weights[..., None], 0)
        d_logits = jnp.where(weights[..., None] == 0, 0, d_logits).astype(hidden.dtype)
        d_hidden = d_hidden + jnp.einsum("btv,ve->bte", d_logits, rows, **products)
        d_rows = jax.lax.dynamic_index_in_dim(d_head, number, keepdims=False)
        d_rows = d_rows + jnp.einsum("btv,bte->ve", d_logits, hidden, **products)
        d_rows = constrained(d_rows, "vocab", "embed")
        return (d_hidden, jax.lax.dynamic_update_index_in_dim(d_head, d_rows, number, 0)), None

    numbers = jnp.arange(len(head))
    empty = jnp.zeros(hidden.shape, weights.dtype)
    (d_hidden, d_head), _ = jax.lax.scan(add, (empty, d_head), (numbers, head, logits), unroll=len(head) == 1)
    return constrained(d_hidden.astype(hidden.dtype), "batch", "time", "residual"), d_head


def _logits(hidden: Float[Array, "batch block embed"], rows: Float[Array, "part embed"]) -> Array:
    logits = linear(hidden, rows, dtype=compute_dtype_for_state(hidden.dtype))
    return constrained(logits, "batch", "time", "vocab")


def _is_target(
    targets: Int[Array, "batch block"], number: Int[Array, ""], rows: Float[Array, "part embed"]
) -> Bool[Array, "batch block part"]:
    """Which logits of a piece are those of the targets.

    A comparison, and not a lookup: it costs nothing beside the rest, and where the vocabulary is cut over devices each
    of them looks at its own part.
    """
    return number * len(rows) + jnp.arange(len(rows)) == targets[..., None]


def _log_normalizer(softmax: _Softmax) -> Float[Array, "batch block"]:
    return jnp.log(softmax.normalizer) + softmax.largest


def _sums(softmax: _Softmax, weights: Float[Array, "batch block"], z_loss: float) -> TokenSums:
    log_normalizer = _log_normalizer(softmax)
    entropy = log_normalizer - softmax.of_target
    return TokenSums(
        loss=_weighted_sum(entropy + z_loss * log_normalizer**2, weights),
        cross_entropy=_weighted_sum(entropy, weights),
        correct=_weighted_sum((softmax.of_target == softmax.largest).astype(weights.dtype), weights),
    )


def _weighted_sum(values: Float[Array, "batch block"], weights: Float[Array, "batch block"]) -> Array:
    """A token of weight 0 adds nothing, whatever its value."""
    return jnp.sum(jnp.where(weights == 0, 0, weights * values))


def _nothing(dtype: jnp.dtype) -> TokenSums:
    return TokenSums(*(jnp.zeros((), dtype) for _ in TokenSums._fields))
