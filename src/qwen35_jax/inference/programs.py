"""The compiled programs of generation: prefill of a chunk, the first draw, and a block of decoding steps.

They are all there is: a generation runs `prefill_chunk` in one of a few padded lengths, `first_token` once, and then
`decode_block` until every row has ended. Sampling settings, stop ids and limits are arrays, so none of them compiles
anything anew.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from qwen35_jax.cache import Cache, init_cache
from qwen35_jax.config import TextConfig
from qwen35_jax.inference.placement import Placement
from qwen35_jax.inference.rows import Allowed, Emission, Limits, Rows, draw_next, empty_emissions
from qwen35_jax.inference.runnable import RunnableModel
from qwen35_jax.inference.sampling import Sampling
from qwen35_jax.inference.speculation import (
    Draft,
    Speculation,
    first_guesses,
    init_draft,
    prefill_head,
    speculative_step,
)
from qwen35_jax.model import Parameters
from qwen35_jax.nn.text_model import TextModel
from qwen35_jax.ops.segments import is_real, last_real


class Memory(NamedTuple):
    """What is remembered between two calls.

    Attributes:
        cache: of the main model.
        logits: after each row's last consumed token of the prompt.
        draft: of the multi-token-prediction head, where it speculates.
    """

    cache: Cache
    logits: Float[Array, "batch vocab"]
    draft: Draft | None


def init_memory(
    model: TextModel, config: TextConfig, *, batch: int, capacity: int, speculation: Speculation | None
) -> Memory:
    """Memory of rows that have consumed nothing.

    Args:
        model: says in which dtype.
        config: of the model.
        batch: rows.
        capacity: tokens that each row has room for.
        speculation: how the head drafts; None without it.
    """
    sizes = {"batch": batch, "capacity": capacity, "dtype": model.dtype}
    return Memory(
        cache=init_cache(config, **sizes),
        logits=jnp.zeros((batch, config.vocab_size), jnp.promote_types(model.dtype, jnp.float32)),
        draft=None if speculation is None else init_draft(config, speculation, **sizes),
    )


def memory_shapes(
    model: RunnableModel, *, batch: int, capacity: int, speculation: Speculation | None
) -> Memory:
    """Shapes and dtypes of the memory of so many rows; arguments as for `init_memory`."""

    def empty() -> Memory:
        merged = nnx.merge(model.graphdef, model.parameters)
        return init_memory(merged, model.config.text, batch=batch, capacity=capacity, speculation=speculation)

    return jax.eval_shape(empty)


def empty_memory(
    model: RunnableModel,
    placement: Placement,
    *,
    batch: int,
    capacity: int,
    speculation: Speculation | None,
) -> Memory:
    """Memory of rows that have consumed nothing. Every device makes its own part: one may not hold the whole."""
    shapes = memory_shapes(model, batch=batch, capacity=capacity, speculation=speculation)
    return jax.tree.map(
        lambda shape, sharding: jnp.zeros(shape.shape, shape.dtype, device=sharding),
        shapes,
        placement.shardings(shapes),
    )


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnames="memory")
def prefill_chunk(
    graphdef: nnx.GraphDef,
    placement: Placement,
    parameters: Parameters,
    memory: Memory,
    tokens: Int[Array, "batch time"],
    segment_ids: Int[Array, "batch time"],
) -> Memory:
    """Consumes the next piece of every prompt.

    Args:
        placement: that of the arguments, and so of the results.
        segment_ids: 1 for tokens, 0 for padding before or after them. A row without tokens stays as it is.
    """
    model = nnx.merge(graphdef, parameters)
    residual, updates = model.residual(tokens, None, segment_ids, memory.cache)
    hidden = model.normed(residual)
    draft = memory.draft
    if draft is not None:
        starts = memory.cache.lengths == 0
        draft = prefill_head(model, draft, residual, hidden, tokens, segment_ids, starts)
    last = last_real(segment_ids)[:, None, None]
    latest = model.logits(jnp.take_along_axis(hidden, last, axis=1)[:, 0])
    cache = memory.cache.extended(updates, is_real(segment_ids))
    # The host has made room: a row that overflowed all the same must not look healthy.
    latest = jnp.where((cache.lengths <= cache.capacity)[:, None], latest, jnp.nan)
    logits = jnp.where(is_real(segment_ids).any(axis=1)[:, None], latest, memory.logits)
    return placement.keep(Memory(cache, logits, draft))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnames=("memory", "rows"))
def first_token(
    graphdef: nnx.GraphDef,
    placement: Placement,
    parameters: Parameters,
    memory: Memory,
    rows: Rows,
    sampling: Sampling,
    limits: Limits,
    allowed: Allowed | None = None,
) -> tuple[Memory, Rows, Emission]:
    """Draws the first token of every answer from the prompt's logits."""
    rows, emission = draw_next(memory.logits, rows, sampling, limits, allowed)
    if memory.draft is not None:
        model = nnx.merge(graphdef, parameters)
        memory = memory._replace(draft=first_guesses(model, memory.draft, rows, sampling, limits))
    return placement.keep((memory, rows, emission))


PASSES_IN_A_BLOCK = 8
"""Passes of the model between two looks of the host: enough to hide its work, few enough to stream by."""

_BlockCarry = tuple[Int[Array, ""], Memory, Rows, Emission]


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnames=("memory", "rows"))
def decode_block(
    graphdef: nnx.GraphDef,
    placement: Placement,
    parameters: Parameters,
    memory: Memory,
    rows: Rows,
    keep: Bool[Array, "batch"],
    sampling: Sampling,
    limits: Limits,
    allowed: Allowed | None = None,
    *,
    steps: Int[Array, ""] | int = PASSES_IN_A_BLOCK,
) -> tuple[Memory, Rows, Emission]:
    """Passes of the model over each row's last token, each with the draws that follow; none when no row is active.

    Args:
        placement: that of the arguments, and so of the results.
        keep: false ends a row from outside, for a stop string.
        allowed: what grammars leave to be drawn. They are asked anew after every token: this takes `steps` of 1.
        steps: passes at most, up to `PASSES_IN_A_BLOCK`. The host sees their tokens together.

    Returns:
        The memory, the rows, and the emissions [PASSES_IN_A_BLOCK position batch] in the order of the answer: one
        position a pass, or as many as drafts and one more where the head speculates.
    """
    model = nnx.merge(graphdef, parameters)

    def more(carry: _BlockCarry) -> Bool[Array, ""]:
        done, _, rows, _ = carry
        return (done < jnp.minimum(steps, PASSES_IN_A_BLOCK)) & rows.active.any()

    def step(carry: _BlockCarry) -> _BlockCarry:
        done, memory, rows, emissions = carry
        # Said again within the loop: without it, devices gather the keys of all heads where these are cut to spread.
        memory, rows = placement.keep((memory, rows))
        if memory.draft is None:
            cache, rows, emission = _plain_step(model, memory.cache, rows, sampling, limits, allowed)
            memory = memory._replace(cache=cache)
        else:
            cache, draft, rows, emission = speculative_step(
                model, memory.cache, memory.draft, rows, sampling, limits, allowed
            )
            memory = memory._replace(cache=cache, draft=draft)
        emissions = jax.tree.map(lambda block, one: block.at[done].set(one), emissions, emission)
        return done + 1, *placement.keep((memory, rows)), emissions

    rows = rows._replace(active=rows.active & keep)
    positions = 1 if memory.draft is None else memory.draft.tokens.shape[1] + 1
    nothing = empty_emissions((PASSES_IN_A_BLOCK, positions, *rows.token.shape), limits)
    _, memory, rows, emissions = jax.lax.while_loop(more, step, (jnp.int32(0), memory, rows, nothing))
    return *placement.keep((memory, rows)), emissions


def _plain_step(
    model: TextModel, cache: Cache, rows: Rows, sampling: Sampling, limits: Limits, allowed: Allowed | None
) -> tuple[Cache, Rows, Emission]:
    """Consumes the token drawn last and draws the next one."""
    segment_ids = rows.active[:, None].astype(jnp.int32)
    hidden, after = model(rows.token[:, None], segment_ids=segment_ids, cache=cache)
    assert after is not None
    rows, emission = draw_next(model.logits(hidden[:, 0]), rows, sampling, limits, allowed)
    return after, rows, jax.tree.map(lambda x: x[None], emission)
