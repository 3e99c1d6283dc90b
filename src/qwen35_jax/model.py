"""The pure functions that make a text model and run it: `forward`, `prefill`, `decode_step`.

A model is split once into a graph definition (hashable, static under `jax.jit`) and its parameters (a nested dict of
arrays); every function that runs it takes both.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from qwen35_jax.cache import Cache
from qwen35_jax.config import ModelConfig, require_dense_text
from qwen35_jax.errors import PromptError
from qwen35_jax.nn.parameter import Keys, key_stream
from qwen35_jax.nn.rematerialization import Rematerialize
from qwen35_jax.nn.text_model import Positions, TextModel, Tokens
from qwen35_jax.ops.segments import is_real, last_real

Parameters = dict[str, Any]


@jax.tree_util.register_static
class GraphDefinition(nnx.GraphDef):
    """A graph definition whose hash is worked out once.

    `jax.jit` asks for the hash of its static arguments at every call, and Flax works it out of the whole graph each
    time: half a millisecond for a small model, which is as long as a decoding step of it.
    """

    __slots__ = ("_hash",)

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", super().__hash__())
            return self._hash


def _text_model(
    config: ModelConfig, parameter_dtype: DTypeLike, dtype: DTypeLike, mtp: bool, keys: Keys
) -> TextModel:
    require_dense_text(config)
    return TextModel(
        config.text,
        tie_word_embeddings=config.tie_word_embeddings,
        parameter_dtype=parameter_dtype,
        dtype=dtype,
        mtp=mtp,
        keys=keys,
    )


def abstract_model(
    config: ModelConfig, *, parameter_dtype: DTypeLike, dtype: DTypeLike, mtp: bool = False
) -> tuple[nnx.GraphDef, Parameters]:
    """The graph definition, and the parameters as shapes and dtypes without data.

    Args:
        config: of a checkpoint.
        parameter_dtype: dtype of storage; the gates of the DeltaNet layers and their norm stay float32.
        dtype: compute dtype, see `TextModel`.
        mtp: with the multi-token-prediction head.
    """
    graphdef, state = nnx.split(_text_model(config, parameter_dtype, dtype, mtp, keys=None))
    definition = GraphDefinition(graphdef.nodes, graphdef.attributes, graphdef.num_leaves)
    return definition, nnx.to_pure_dict(state)


def init_model(
    config: ModelConfig,
    *,
    seed: int,
    parameter_dtype: DTypeLike,
    dtype: DTypeLike,
    mtp: bool = False,
) -> tuple[nnx.GraphDef, Parameters]:
    """The graph definition, and random parameters to train from. Arguments as for `abstract_model`."""
    graphdef, _ = abstract_model(config, parameter_dtype=parameter_dtype, dtype=dtype, mtp=mtp)
    return graphdef, _random_parameters(config, jnp.dtype(parameter_dtype), mtp, jax.random.key(seed))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _random_parameters(
    config: ModelConfig, parameter_dtype: DTypeLike, mtp: bool, key: jax.Array
) -> Parameters:
    model = _text_model(config, parameter_dtype, jnp.float32, mtp, key_stream(key))
    return nnx.to_pure_dict(nnx.state(model))


def forward(
    graphdef: nnx.GraphDef,
    parameters: Parameters,
    tokens: Tokens,
    *,
    positions: Positions | None = None,
    segment_ids: Tokens | None = None,
    rematerialize: Rematerialize = "all",
) -> Float[Array, "batch time vocab"]:
    """Logits of every token, for training and scoring: no cache, differentiable.

    Pure and not jitted: call it inside your own `jax.jit`. See `TextModel.__call__` for the arguments.
    """
    model = nnx.merge(graphdef, parameters)
    hidden, _ = model(tokens, positions=positions, segment_ids=segment_ids, rematerialize=rematerialize)
    return model.logits(hidden)


@functools.partial(jax.jit, static_argnums=0, donate_argnames="cache")
def _extend(
    graphdef: nnx.GraphDef,
    parameters: Parameters,
    tokens: Tokens,
    cache: Cache,
    segment_ids: Tokens | None,
    positions: Positions | None,
) -> tuple[Float[Array, "batch vocab"], Cache]:
    """Logits of each row's last real token, and the cache after it."""
    model = nnx.merge(graphdef, parameters)
    hidden, cache = model(tokens, positions=positions, segment_ids=segment_ids, cache=cache)
    if segment_ids is None:
        hidden = hidden[:, -1]
    else:
        hidden = jnp.take_along_axis(hidden, last_real(segment_ids)[:, None, None], axis=1)[:, 0]
    # A caller's own trace passes no check of the capacity: a row that overflowed must not look healthy.
    fits = cache.lengths <= cache.capacity
    return jnp.where(fits[:, None], model.logits(hidden), jnp.nan), cache


def prefill(
    graphdef: nnx.GraphDef,
    parameters: Parameters,
    tokens: Tokens,
    cache: Cache,
    *,
    segment_ids: Tokens | None = None,
    positions: Positions | None = None,
) -> tuple[Float[Array, "batch vocab"], Cache]:
    """Consumes a prompt, or the next piece of one.

    Args:
        graphdef: from `abstract_model` or a loader.
        parameters: from the same.
        tokens: ids, padded to one length.
        cache: before these tokens. It is donated: use the returned one.
        segment_ids: 1 for real tokens and 0 for padding; None where nothing is padded. A row of a cache is one
            document: packed rows are for `forward`.
        positions: see `TextModel.__call__`.

    Returns:
        Logits after each row's last real token (meaningless for a row that is all padding), and the cache.

    Raises:
        CapacityError: a row would pass the cache's capacity.
        PromptError: tokens that are not whole numbers [batch time] with the cache's rows, segment ids of another shape,
            or a row that holds two documents, or padding inside one.

    Both are raised before anything runs. Under a caller's own trace no value is known: there a row that passes the
    capacity gets NaN for logits.
    """
    _check_tokens(tokens, cache, segment_ids)
    if segment_ids is None:
        cache.check_room(tokens.shape[1])
    else:
        _check_one_document(segment_ids)
        cache.check_room(is_real(segment_ids).sum(axis=1))
    return _extend(graphdef, parameters, tokens, cache, segment_ids, positions)


def _check_tokens(tokens: Tokens, cache: Cache, segment_ids: Tokens | None) -> None:
    if not hasattr(tokens, "dtype"):
        raise PromptError(f"tokens are a {type(tokens).__name__}, expected an array: jnp.asarray(tokens)")
    shape = jnp.shape(tokens)
    rows = cache.lengths.shape[0]
    if len(shape) != 2 or shape[0] != rows or not shape[1]:
        raise PromptError(
            f"tokens have shape {shape}, expected ({rows}, time) for a cache of {rows} rows, and at least one token"
        )
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise PromptError(f"tokens are {tokens.dtype}, expected whole numbers")
    if segment_ids is not None and jnp.shape(segment_ids) != shape:
        raise PromptError(
            f"segment_ids have shape {jnp.shape(segment_ids)}, expected that of the tokens, {shape}"
        )


def _check_one_document(segment_ids: Tokens) -> None:
    if isinstance(segment_ids, Tracer):
        return
    for row, ids in enumerate(jax.device_get(segment_ids)):
        real = is_real(ids)
        documents = sorted(set(ids[real].tolist()))
        if len(documents) > 1:
            raise PromptError(
                f"segment_ids: row {row} holds documents {documents}, but a row of a cache is one document; "
                "give each a row of its own, or pack them in forward(), which keeps no cache"
            )
        if (np.diff(np.flatnonzero(real)) > 1).any():
            raise PromptError(
                f"segment_ids: row {row} has padding between its tokens, expected it before or after them only"
            )


def decode_step(
    graphdef: nnx.GraphDef,
    parameters: Parameters,
    tokens: Int[Array, " batch"],
    cache: Cache,
    *,
    active: Bool[Array, " batch"] | None = None,
    positions: Positions | None = None,
) -> tuple[Float[Array, "batch vocab"], Cache]:
    """Consumes one token per row.

    Rows that are not `active` are frozen: their token is ignored and their cache stays as it is, bit for bit.
    Arguments, results and errors are otherwise those of `prefill`. The check of the capacity waits for the device to
    finish the step before; a loop that should not wait runs under its own `jax.jit`, as `qwen35_jax.inference` does.
    """
    if tokens.ndim != 1:
        raise PromptError(
            f"tokens have shape {tokens.shape}, expected ({cache.lengths.shape[0]},): one per row"
        )
    segment_ids = None if active is None else active[:, None].astype(jnp.int32)
    tokens = jnp.asarray(tokens)
    _check_tokens(tokens[:, None], cache, segment_ids)
    cache.check_room(1 if active is None else active.astype(jnp.int32))
    return _extend(graphdef, parameters, tokens[:, None], cache, segment_ids, positions)
