"""What every layer of one call needs to know about its tokens, computed once before the stack."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenContext:
    """Where each token stands.

    Attributes:
        rotary_cos: cosines of the rotary phases, in float32 (float64 in a float64 model).
        rotary_sin: their sines.
        segment_ids: 0 marks padding, positive numbers are documents; None means one document, no padding.
        past_lengths: tokens that each row's cache holds already; None without a cache.
        first_row: of this call's rows among those of the attention layers' caches, see `Cache`; None where they are
            the same.
        repeat: which repeat of the layer pattern is running, and so which part of a stacked cache is its own; None
            outside a stack.
        tentative: the tokens are guesses, of one document; a row is real, or padding as a whole. DeltaNet layers then
            return what each token would do to their memory, instead of the memory after all of them.
    """

    rotary_cos: Float[Array, "batch time rotary_half"]
    rotary_sin: Float[Array, "batch time rotary_half"]
    segment_ids: Int[Array, "batch time"] | None
    past_lengths: Int[Array, " batch"] | None
    first_row: Int[Array, ""] | None = None
    repeat: Int[Array, ""] | None = None
    tentative: bool = dataclasses.field(default=False, metadata={"static": True})

    def documents(self, like: Shaped[Array, "batch time ..."]) -> Int[Array, "batch time"]:
        """The segment ids, also where there is one document and no padding: as many as there are tokens in an array."""
        return jnp.ones(like.shape[:2], jnp.int32) if self.segment_ids is None else self.segment_ids
