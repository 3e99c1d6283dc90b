"""The multi-token-prediction head: one more layer that guesses the token after the next."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from qwen35_jax.cache import LayerCache, LayerUpdate
from qwen35_jax.config import TextConfig
from qwen35_jax.nn.context import TokenContext
from qwen35_jax.nn.decoder import DecoderLayer
from qwen35_jax.nn.norm import RMSNorm
from qwen35_jax.nn.parameter import Keys, normal, parameter
from qwen35_jax.nn.projection import merge_heads

Hidden = Float[Array, "batch time embed"]


class MultiTokenPrediction(nnx.Module):
    """From the hidden value at token t and the embedding of token t + 1, the hidden value for token t + 2.

    Embedding and output head are the main model's. Source: the `mtp.*` tensors of the published checkpoints and
    the generic `MtpModel` of the reference implementation; the fused projection takes the embedding first.
    """

    def __init__(self, config: TextConfig, *, parameter_dtype: DTypeLike, keys: Keys):
        def norm() -> RMSNorm:
            return RMSNorm(
                config.hidden_size,
                eps=config.rms_norm_eps,
                parameter_dtype=parameter_dtype,
                keys=keys,
            )

        self.embedding_norm = norm()
        self.hidden_norm = norm()
        self.fc_weight = parameter(
            keys,
            normal(config.initializer_range),
            {"mtp_embed": config.hidden_size, "mtp_part": 2, "embed": config.hidden_size},
            parameter_dtype,
        )
        self.layer = DecoderLayer(config, "full_attention", parameter_dtype=parameter_dtype, keys=keys)
        self.norm = norm()

    def __call__(
        self,
        hidden: Hidden,
        next_embedding: Hidden,
        context: TokenContext,
        cache: LayerCache | None,
    ) -> tuple[Hidden, LayerUpdate]:
        """One draft step for every token.

        Args:
            hidden: the main model's values after its final norm, at token t.
            next_embedding: embedding of token t + 1.
            context: positions and segment ids of token t + 1.
            cache: the head's own keys and values, or None.

        Returns:
            Values for the output head (and, fed back as `hidden`, for the next draft), and the new keys and values.
        """
        with jax.named_scope("mtp.fc"):
            pair = jnp.stack([self.embedding_norm(next_embedding), self.hidden_norm(hidden)], axis=2)
            x = merge_heads(pair, self.fc_weight[...])
        with jax.named_scope("mtp.layer"):
            x, update = self.layer(x, context, cache)
        with jax.named_scope("mtp.norm"):
            return self.norm(x), update
