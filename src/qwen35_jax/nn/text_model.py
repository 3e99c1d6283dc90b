"""The language model as a module: embedding, decoder stack, final norm, output head, and the MTP head beside them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from qwen35_jax.cache import Cache
from qwen35_jax.config import TextConfig
from qwen35_jax.nn.context import TokenContext
from qwen35_jax.nn.decoder import Decoder
from qwen35_jax.nn.embedding import Embedding
from qwen35_jax.nn.mtp import MultiTokenPrediction
from qwen35_jax.nn.norm import RMSNorm
from qwen35_jax.nn.parameter import Keys, compute_dtype_for_state
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
        x = self.embed(tokens if segment_ids is None else jnp.where(is_real(segment_ids), tokens, 0))
        x, updates = self.decoder(
            x, context, None if cache is None else cache.groups, rematerialize=rematerialize
        )
        with jax.named_scope("final_norm"):
            hidden = self.final_norm(x)
        if cache is None:
            return hidden, None
        assert updates is not None
        real = jnp.ones(tokens.shape, bool) if segment_ids is None else is_real(segment_ids)
        return hidden, cache.extended(updates, real)

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
