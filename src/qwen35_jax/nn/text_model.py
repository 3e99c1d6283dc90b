"""The language model as a module: embedding, decoder stack, final norm, output head, and the MTP head beside them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from qwen35_jax.cache import Cache
from qwen35_jax.config import TextConfig
from qwen35_jax.logical_axes import constrained
from qwen35_jax.nn.context import TokenContext
from qwen35_jax.nn.decoder import Decoder, StackUpdates
from qwen35_jax.nn.embedding import Embedding
from qwen35_jax.nn.mtp import MultiTokenPrediction
from qwen35_jax.nn.norm import RMSNorm
from qwen35_jax.nn.parameter import Keys, compute_dtype_for_state
from qwen35_jax.nn.rematerialization import Rematerialize
from qwen35_jax.ops.rope import rotary_cos_sin, rotary_frequencies
from qwen35_jax.ops.segments import is_real
from qwen35_jax.ops.segments import positions as segment_positions

Tokens = Int[Array, "batch time"]
Hidden = Float[Array, "batch time embed"]
Positions = Int[Array, "batch time"] | Int[Array, "3 batch time"]


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
        rematerialize: Rematerialize = "none",
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
        x, updates = self.residual(tokens, positions, segment_ids, cache, rematerialize=rematerialize)
        hidden = self.normed(x)
        if cache is None:
            return hidden, None
        assert updates is not None
        return hidden, cache.extended(updates, _real(tokens, segment_ids))

    def residual(
        self,
        tokens: Tokens,
        positions: Positions | None,
        segment_ids: Tokens | None,
        cache: Cache | None,
        *,
        rematerialize: Rematerialize = "none",
        tentative: bool = False,
    ) -> tuple[Hidden, StackUpdates | None]:
        """The residual stream before the final norm, and what the tokens add to the cache.

        Arguments are those of `__call__`, and `tentative`, which leaves open how many of the tokens will count:
        `cache.extended(updates, counts)` then is the cache after the leading ones that do.
        """
        context = dataclasses.replace(
            self.context(tokens, positions, segment_ids, cache), tentative=tentative
        )
        x = self.embed(_without_padding(tokens, segment_ids))
        return self.decoder(x, context, None if cache is None else cache.groups, rematerialize=rematerialize)

    @jax.named_scope("final_norm")
    def normed(self, residual: Hidden) -> Hidden:
        return self.final_norm(residual)

    @jax.named_scope("embed")
    def embed(self, tokens: Tokens) -> Hidden:
        return constrained(self.embed_tokens.lookup(tokens, self.dtype), "batch", "time", "residual")

    @jax.named_scope("lm_head")
    def logits(self, hidden: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Scores of every token of the vocabulary, from values after the final norm."""
        return self._head.logits(hidden)

    @property
    def head_weight(self) -> Float[Array, "vocab embed"]:
        """The rows of the output head, for losses that never hold all logits."""
        return self._head.weight[...]

    @property
    def _head(self) -> Embedding:
        return self.embed_tokens if self.tied else self.lm_head

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
        return TokenContext(cos, sin, segment_ids, lengths, None if cache is None else cache.first_row)

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
        # Nothing follows the last token: it counts as padding, so that the length stays one that devices divide.
        tokens, following, positions = (jnp.roll(x, -1, axis=-1) for x in (tokens, ids, positions))
        pair_ids = jnp.where(following == ids, ids, 0).at[:, -1].set(0)
        context = self.context(tokens, positions, pair_ids, None)
        drafted, _ = self.mtp(hidden, self.embed(_without_padding(tokens, pair_ids)), context, None)
        return drafted[:, :-1]

    def draft(
        self, hidden: Hidden, tokens: Tokens, cache: Cache, segment_ids: Tokens
    ) -> tuple[Hidden, Cache]:
        """The MTP head over the next tokens of a sequence, each with the hidden value of the token before it.

        Args:
            hidden: the main model's values at the tokens before `tokens`, or the head's own for those it has drafted.
            tokens: ids. A sequence's first token has none before it and is not among them.
            cache: the head's own memory, from `init_draft_cache`.
            segment_ids: 0 marks padding.

        Returns:
            Hidden values of the tokens after `tokens`, ready for `logits`, and the head's memory.
        """
        positions = segment_positions(segment_ids, cache.lengths + 1)
        context = self.context(tokens, positions, segment_ids, cache)
        context = dataclasses.replace(context, repeat=jnp.int32(0))
        embedded = self.embed(_without_padding(tokens, segment_ids))
        drafted, update = self.mtp(hidden, embedded, context, cache.groups[0][0])
        stacked = jax.tree.map(lambda x: x[None], update)
        return drafted, cache.extended(((stacked,),), is_real(segment_ids))


def _real(tokens: Tokens, segment_ids: Tokens | None) -> Bool[Array, "batch time"]:
    return jnp.ones(tokens.shape, bool) if segment_ids is None else is_real(segment_ids)


def _without_padding(tokens: Tokens, segment_ids: Tokens | None) -> Tokens:
    """Padding may hold any id, and one outside the vocabulary is NaN: zero times it would reach every gradient."""
    return tokens if segment_ids is None else jnp.where(is_real(segment_ids), tokens, 0)
