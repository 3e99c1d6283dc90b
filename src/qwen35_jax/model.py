"""The text model, and the pure functions that run it: `forward`, `prefill`, `decode_step`.

A model is split once into a graph definition (hashable, static under `jax.jit`) and its parameters (a nested dict of
arrays); every function here takes both.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from qwen35_jax.cache import Cache, advance
from qwen35_jax.config import ModelConfig, TextConfig, require_dense_text
from qwen35_jax.errors import PromptError
from qwen35_jax.nn.context import TokenContext
from qwen35_jax.nn.decoder import Decoder
from qwen35_jax.nn.mtp import MultiTokenPrediction
from qwen35_jax.nn.norm import RMSNorm
from qwen35_jax.nn.parameter import Keys, compute_dtype_for_state, key_stream, normal, parameter
from qwen35_jax.ops.linear import linear
from qwen35_jax.ops.rope import rotary_cos_sin, rotary_frequencies
from qwen35_jax.ops.segments import positions as segment_positions

Parameters = dict[str, Any]
Tokens = Int[Array, "batch time"]
Hidden = Float[Array, "batch time embed"]
Positions = Int[Array, "batch time"] | Int[Array, "3 batch time"]


class Embedding(nnx.Module):
    """A vector per token; also the output head, whose rows are the vectors to compare with."""

    def __init__(self, config: TextConfig, *, parameter_dtype: DTypeLike, keys: Keys):
        axes = {"vocab": config.vocab_size, "embed": config.hidden_size}
        self.weight = parameter(keys, normal(config.initializer_range), axes, parameter_dtype)

    def lookup(self, tokens: Tokens, dtype: DTypeLike) -> Hidden:
        # An id outside the vocabulary gives NaN: JAX would otherwise read the nearest row without a word.
        rows = self.weight[...].at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        return rows.astype(dtype)

    def logits(self, hidden: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Products summed in float32 (float64 in a float64 model), and left there for softmax and loss."""
        return linear(hidden, self.weight[...], dtype=compute_dtype_for_state(hidden.dtype))


class TextModel(nnx.Module):
    """The language model of a Qwen3.5 checkpoint.

    Attributes:
        dtype: compute dtype of activations and matrix products. Norms, softmax, gates, decay and states use float32
            (float64 in a float64 model) whatever it is.

    Source: `Qwen3_5TextModel` and `Qwen3_5ForCausalLM` of the reference implementation.
    """

    def __init__(
        self,
        config: TextConfig,
        *,
        tie_word_embeddings: bool,
        parameter_dtype: DTypeLike,
        dtype: DTypeLike,
        mtp: bool,
        keys: Keys,
    ):
        made_with = {"parameter_dtype": parameter_dtype, "keys": keys}
        self.embed_tokens = Embedding(config, **made_with)
        self.decoder = Decoder(config, **made_with)
        self.final_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, **made_with)
        if not tie_word_embeddings:
            self.lm_head = Embedding(config, **made_with)
        if mtp:
            self.mtp = MultiTokenPrediction(config, **made_with)
        self.tied = tie_word_embeddings
        self.rope = config.rope
        self.rotary_dim = config.rotary_dim
        self.dtype = jnp.dtype(dtype)

    def __call__(
        self,
        tokens: Tokens,
        *,
        positions: Positions | None = None,
        segment_ids: Tokens | None = None,
        cache: Cache | None = None,
        rematerialize: bool = False,
    ) -> tuple[Hidden, Cache | None]:
        """Hidden values after the final norm, and the cache after these tokens.

        Args:
            tokens: ids.
            positions: rotary positions, one row or three (time, height, width) per token. By default they count real
                tokens from the start of each segment; the first segment goes on where the cache ends.
            segment_ids: 0 marks padding, positive numbers are documents packed into one row. Nothing flows between
                documents, nor out of padding. The cache belongs to the first document of a row.
            cache: memory of earlier tokens, or None to start empty and keep nothing.
            rematerialize: see `Decoder`.
        """
        context = self.context(tokens, positions, segment_ids, cache)
        # Padding may hold any id, and one outside the vocabulary is NaN: zero times it would reach every gradient.
        x = self.embed(tokens if segment_ids is None else jnp.where(segment_ids > 0, tokens, 0))
        x, updates = self.decoder(
            x, context, None if cache is None else cache.groups, rematerialize=rematerialize
        )
        with jax.named_scope("final_norm"):
            hidden = self.final_norm(x)
        if cache is None:
            return hidden, None
        assert updates is not None
        real = jnp.ones(tokens.shape, bool) if segment_ids is None else segment_ids > 0
        return hidden, advance(cache, updates, real)

    @jax.named_scope("embed")
    def embed(self, tokens: Tokens) -> Hidden:
        return self.embed_tokens.lookup(tokens, self.dtype)

    @jax.named_scope("lm_head")
    def logits(self, hidden: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Scores of every token of the vocabulary, from values after the final norm."""
        return (self.embed_tokens if self.tied else self.lm_head).logits(hidden)

    def context(
        self,
        tokens: Tokens,
        positions: Positions | None,
        segment_ids: Tokens | None,
        cache: Cache | None,
    ) -> TokenContext:
        """Rotary phases, segments and past lengths of a call's tokens."""
        lengths = None if cache is None else cache.lengths
        if positions is None:
            ids = jnp.ones(tokens.shape, jnp.int32) if segment_ids is None else segment_ids
            positions = segment_positions(ids, lengths)
        frequencies, scaling = rotary_frequencies(
            self.rope, self.rotary_dim, dtype=compute_dtype_for_state(self.dtype)
        )
        cos, sin = rotary_cos_sin(positions, frequencies, self.rope.mrope_section, scaling)
        return TokenContext(cos, sin, segment_ids, lengths)

    def draft_hidden(
        self,
        hidden: Hidden,
        tokens: Tokens,
        *,
        positions: Positions | None = None,
        segment_ids: Tokens | None = None,
    ) -> Float[Array, "batch time_minus_1 embed"]:
        """The MTP head over a whole sequence: value t is for token t + 2, from `hidden` at t and token t + 1.

        A pair of tokens that lies in two documents, or in padding, counts as padding.
        """
        ids = jnp.ones(tokens.shape, jnp.int32) if segment_ids is None else segment_ids
        if positions is None:
            positions = segment_positions(ids, None)
        pair_ids = jnp.where(ids[:, 1:] == ids[:, :-1], ids[:, 1:], 0)
        context = self.context(tokens[:, 1:], positions[..., 1:], pair_ids, None)
        drafted, _ = self.mtp(hidden[:, :-1], self.embed(tokens[:, 1:]), context, None)
        return drafted


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
    return graphdef, nnx.to_pure_dict(state)


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
    rematerialize: bool = True,
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
        last = jnp.where(segment_ids > 0, jnp.arange(tokens.shape[1]), 0).max(axis=1)
        hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
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
        PromptError: a row holds two documents.

    Both are raised before anything runs. Under a caller's own trace no value is known: there a row that passes the
    capacity gets NaN for logits.
    """
    _check_one_document(segment_ids)
    real = tokens.shape[1] if segment_ids is None else (segment_ids > 0).sum(axis=1)
    cache.check_room(real)
    return _extend(graphdef, parameters, tokens, cache, segment_ids, positions)


def _check_one_document(segment_ids: Tokens | None) -> None:
    if segment_ids is None or isinstance(segment_ids, Tracer) or segment_ids.shape[1] == 1:
        return
    for row, ids in enumerate(jax.device_get(segment_ids)):
        documents = sorted(set(ids[ids > 0].tolist()))
        if len(documents) > 1:
            raise PromptError(
                f"segment_ids: row {row} holds documents {documents}, but a row of a cache is one document; "
                "give each a row of its own, or pack them in forward(), which keeps no cache"
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
    Arguments, results and errors are otherwise those of `prefill`.
    """
    segment_ids = None if active is None else active[:, None].astype(jnp.int32)
    return prefill(
        graphdef,
        parameters,
        tokens[:, None],
        cache,
        segment_ids=segment_ids,
        positions=positions,
    )
