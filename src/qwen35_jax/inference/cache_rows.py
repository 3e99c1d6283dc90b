"""The rows of a cache as a whole: empty ones, and others in their place."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from qwen35_jax.cache import Cache, init_cache
from qwen35_jax.config import TextConfig
from qwen35_jax.inference.placement import Placement
from qwen35_jax.inference.runnable import RunnableModel


def empty_cache(model: RunnableModel, placement: Placement, *, batch: int, capacity: int) -> Cache:
    """A cache that has consumed nothing. Every device makes its own part: one may not hold the whole.

    Args:
        model: whose memory it will be.
        placement: of its parameters.
        batch: rows.
        capacity: tokens that each row has room for.
    """

    dtype = nnx.merge(model.graphdef, model.parameters).dtype
    return _maker(model.config.text, batch, capacity, dtype, placement)()


@functools.lru_cache(maxsize=32)
def _maker(
    config: TextConfig, batch: int, capacity: int, dtype: np.dtype, placement: Placement
) -> Callable[[], Cache]:
    """One compiled program instead of an array after the other: a scoring run makes a cache for every few rows."""
    make = functools.partial(init_cache, config, batch=batch, capacity=capacity, dtype=dtype)
    return jax.jit(make, out_shardings=placement.shardings(jax.eval_shape(make)))


def take_rows(cache: Cache, rows: Int[Array, " new_batch"]) -> Cache:
    """A cache whose row i is row `rows[i]` of this one, bit for bit.

    All that a row remembers comes along: keys and values, the matrices and convolution windows of the DeltaNet layers,
    and its length. A row may be taken several times or not at all, so that a batch can be reordered (beam search),
    widened (many continuations of one text) or narrowed.

    Args:
        cache: of a model or of its multi-token-prediction head. Pure: it stays as it is.
        rows: from 0 to the cache's number of rows, without that.
    """
    # Stacked over the repeats of a layer pattern, all but the lengths have the batch second.
    groups = jax.tree.map(lambda stacked: stacked.at[:, rows].get(mode="clip"), cache.groups)
    return dataclasses.replace(cache, groups=groups, lengths=cache.lengths.at[rows].get(mode="clip"))
