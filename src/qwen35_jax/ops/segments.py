"""Segments of a row of tokens: the one mechanism behind padding, packing, bucketing and chunked prefill.

`segment_ids` holds one whole number per token. 0 is padding, positive numbers name documents; any two
neighbouring documents of a row must carry different numbers. Padding may stand before, between or after
documents, not inside one.

A real token *cuts* when the last real token before it, in this call, carried another number: whatever was
carried so far (matrix state, convolution window, attended keys) ends there. The first real token of a row
never cuts, so that the first segment of a call continues what the cache carried in.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int


def is_real(segment_ids: Int[Array, "*batch"]) -> Bool[Array, "*batch"]:
    """True at tokens, false at padding."""
    return segment_ids > 0


def last_real(segment_ids: Int[Array, "batch time"]) -> Int[Array, "batch"]:
    """Index of each row's last token that is no padding; 0 in a row of padding."""
    return jnp.where(is_real(segment_ids), jnp.arange(segment_ids.shape[1]), 0).max(axis=1)


def segment_starts(segment_ids: Int[Array, "batch time"]) -> Bool[Array, "batch time"]:
    """True at every real token that cuts; nowhere in the first segment of a row, which continues the cache."""
    time = segment_ids.shape[-1]
    real = is_real(segment_ids)
    newest_real = lax.cummax(jnp.where(real, jnp.arange(time, dtype=jnp.int32), -1), axis=1)
    newest_before = jnp.pad(newest_real[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    id_before = jnp.take_along_axis(segment_ids, jnp.maximum(newest_before, 0), axis=1)
    return real & (newest_before >= 0) & (id_before != segment_ids)


def segment_index(segment_ids: Int[Array, "batch time"]) -> Int[Array, "batch time"]:
    """Cuts up to and including each token: 0 in the first segment; padding inherits what stands before it."""
    return jnp.cumsum(segment_starts(segment_ids).astype(jnp.int32), axis=1)


def positions(
    segment_ids: Int[Array, "batch time"], offset: Int[Array, "batch"] | None = None
) -> Int[Array, "batch time"]:
    """Position of each token in its document, counting real tokens only.

    Args:
        segment_ids: 0 for padding, positive numbers for documents.
        offset: tokens of each row consumed in earlier calls. Added in the first segment, which continues them;
            every later segment starts at 0.

    Returns:
        int32 positions. Padding gets a valid position of no meaning.
    """
    starts = segment_starts(segment_ids)
    real_before = jnp.cumsum(is_real(segment_ids).astype(jnp.int32), axis=1) - 1
    real_before_segment = lax.cummax(jnp.where(starts, real_before, 0), axis=1)
    in_segment = real_before - real_before_segment
    if offset is not None:
        first_segment = jnp.cumsum(starts.astype(jnp.int32), axis=1) == 0
        in_segment = in_segment + jnp.where(first_segment, offset[:, None].astype(jnp.int32), 0)
    return jnp.maximum(in_segment, 0)
