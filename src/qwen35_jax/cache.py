"""The decoding state as one pytree: what a model remembers of the tokens that it has consumed.

Attention layers keep a key and a value per token. Gated DeltaNet layers keep a matrix per head and the last few
inputs of their convolution, whatever the length. All leaves are stacked over the repeats of the layer pattern, as
the parameters are. Functions take a cache and return the next one; nothing is changed in place.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt16

from qwen35_jax.config import TextConfig
from qwen35_jax.errors import CapacityError, ConfigError
from qwen35_jax.layer_groups import layer_groups
from qwen35_jax.ops.causal_conv import next_window
from qwen35_jax.ops.gated_delta_rule.tentative import state_after
from qwen35_jax.ops.moving import storage_dtype, to_storage


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaNetCache:
    """Memory of one Gated DeltaNet layer (in a `Cache`, of that layer in all repeats of the pattern).

    Attributes:
        window_q: last kernel - 1 inputs of the query's convolution, before the activation.
        window_k: the same of the key's.
        window_v: the same of the value's.
        state: the matrix of each head, float32 whatever the compute dtype (float64 in a float64 model).
    """

    window_q: Float[Array, "*repeats batch window key_heads key_dim"]
    window_k: Float[Array, "*repeats batch window key_heads key_dim"]
    window_v: Float[Array, "*repeats batch window value_heads value_dim"]
    state: Float[Array, "*repeats batch value_heads key_dim value_dim"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionCache:
    """Keys (normed and rotated) and values of one attention layer, a slot per consumed token.

    On a CPU, bfloat16 ones are kept as their bits: `ops.moving.from_storage` reads them.
    """

    key: Float[Array, "*repeats batch capacity kv_heads head_dim"] | UInt16[Array, "..."]
    value: Float[Array, "*repeats batch capacity kv_heads head_dim"] | UInt16[Array, "..."]


LayerCache = DeltaNetCache | AttentionCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaNetInputs:
    """What tokens would do to the memory of one Gated DeltaNet layer, for when only some of them come to count.

    Attributes:
        conv_q: inputs of the query's convolution.
        conv_k: the same of the key's.
        conv_v: the same of the value's.
        k: keys, as `gated_delta_rule` takes them.
        corrections: what each token writes at its key, see `ops.gated_delta_rule.tentative`.
        log_decay: log decays.
    """

    conv_q: Float[Array, "*repeats batch time key_heads key_dim"]
    conv_k: Float[Array, "*repeats batch time key_heads key_dim"]
    conv_v: Float[Array, "*repeats batch time value_heads value_dim"]
    k: Float[Array, "*repeats batch time key_heads key_dim"]
    corrections: Float[Array, "*repeats batch time value_heads value_dim"]
    log_decay: Float[Array, "*repeats batch time value_heads"]

    def applied_to(self, old: DeltaNetCache, counts: Bool[Array, "batch time"]) -> DeltaNetCache:
        """The memory after those of the tokens that count; neither side has a `repeats` axis here."""
        tokens = counts.sum(axis=1)
        return DeltaNetCache(
            window_q=next_window(self.conv_q, old.window_q, tokens),
            window_k=next_window(self.conv_k, old.window_k, tokens),
            window_v=next_window(self.conv_v, old.window_v, tokens),
            state=state_after(old.state, self.k, self.corrections, self.log_decay, counts),
        )


LayerUpdate = DeltaNetCache | DeltaNetInputs | AttentionCache
"""What a layer hands back for the tokens of a call: its new memory, or what they would do to it, or their keys."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """The memory of a whole model.

    Attributes:
        groups: for each layer group, for each position of its pattern, that layer's memory with a leading
            `repeats` axis.
        lengths: tokens consumed by each row; padding does not count.
        capacity: tokens that each row has room for.
        first_row: given, the attention layers' arrays hold more rows than the rest of the cache, whose own begin at
            this one. So a few rows of a large cache are worked on without a copy of all their keys and values.
    """

    groups: tuple[tuple[LayerCache, ...], ...]
    lengths: Int[Array, " batch"]
    capacity: int = dataclasses.field(metadata={"static": True})
    first_row: Int[Array, ""] | None = None

    def check_room(self, new_tokens: Int[Array, " batch"] | int) -> None:
        """Raises `CapacityError` where a row has no room for that many more tokens.

        Reads `lengths` from the device. Under a trace the lengths are unknown and nothing is checked: a caller that
        jits its own loop checks once before it, as `qwen35_jax.inference` does.
        """
        if isinstance(self.lengths, Tracer) or isinstance(new_tokens, Tracer):
            return
        wanted = jax.device_get(self.lengths + new_tokens)
        row = int(wanted.argmax())
        if wanted[row] > self.capacity:
            raise CapacityError(
                f"cache: row {row} would hold {wanted[row]} tokens, but the capacity is {self.capacity}; "
                f"make the cache with init_cache(..., capacity={wanted[row]}) or shorten the prompt"
            )

    def extended(
        self, updates: tuple[tuple[LayerUpdate, ...], ...], real: Bool[Array, "batch time"]
    ) -> Cache:
        """The memory after a call.

        Args:
            updates: per layer, the new DeltaNet memory or what the call's tokens would do to it, or their keys and
                values.
            real: true where a token counts. Others are written nowhere. Where a DeltaNet layer's new memory is among
                `updates`, these must be the tokens that were not padding in the call.
        """
        order = jnp.cumsum(real, axis=1) - 1
        slots = jnp.where(real, self.lengths[:, None] + order, self.capacity)
        rows = jnp.arange(real.shape[0])[:, None] + (0 if self.first_row is None else self.first_row)

        def write(stacked: Array, new: Array) -> Array:
            return stacked.at[:, rows, slots].set(to_storage(new, stacked.dtype), mode="drop")

        def next_layer(old: LayerCache, update: LayerUpdate) -> LayerCache:
            if isinstance(old, AttentionCache):
                assert isinstance(update, AttentionCache)
                return AttentionCache(write(old.key, update.key), write(old.value, update.value))
            if isinstance(update, DeltaNetInputs):
                return jax.vmap(lambda update, old: update.applied_to(old, real))(update, old)
            assert isinstance(update, DeltaNetCache)
            return update

        return dataclasses.replace(
            self,
            groups=tuple(
                tuple(map(next_layer, olds, news)) for olds, news in zip(self.groups, updates, strict=True)
            ),
            lengths=self.lengths + real.sum(axis=1, dtype=self.lengths.dtype),
        )


def init_cache(config: TextConfig, *, batch: int, capacity: int, dtype: DTypeLike) -> Cache:
    """An empty cache.

    Args:
        config: the text model's configuration.
        batch: rows.
        capacity: tokens that each row has room for.
        dtype: the compute dtype of the model; states are float32, or float64 in a float64 model.

    Raises:
        CapacityError: `batch` or `capacity` is not a whole number of at least 1.
        ConfigError: `config` is that of a whole checkpoint.
    """
    if not isinstance(config, TextConfig):
        raise ConfigError(f"config is a {type(config).__name__}, expected its TextConfig: config.text")
    for name, size in (("batch", batch), ("capacity", capacity)):
        if not isinstance(size, int | np.integer) or size < 1:
            raise CapacityError(f"{name}: {size}, expected a whole number of at least 1")
    window = config.linear_conv_kernel_dim - 1
    keys = (config.linear_num_key_heads, config.linear_key_head_dim)
    values = (config.linear_num_value_heads, config.linear_value_head_dim)
    state = (config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
    state_dtype = jnp.promote_types(dtype, jnp.float32)

    def delta_net(repeats: int) -> DeltaNetCache:
        return DeltaNetCache(
            window_q=jnp.zeros((repeats, batch, window, *keys), dtype),
            window_k=jnp.zeros((repeats, batch, window, *keys), dtype),
            window_v=jnp.zeros((repeats, batch, window, *values), dtype),
            state=jnp.zeros((repeats, batch, *state), state_dtype),
        )

    return Cache(
        groups=tuple(
            tuple(
                delta_net(group.repeats)
                if kind == "linear_attention"
                else _empty_attention(config, group.repeats, batch, capacity, dtype)
                for kind in group.pattern
            )
            for group in layer_groups(config)
        ),
        lengths=jnp.zeros((batch,), jnp.int32),
        capacity=capacity,
    )


def init_draft_cache(config: TextConfig, *, batch: int, capacity: int, dtype: DTypeLike) -> Cache:
    """An empty memory of the multi-token-prediction head: one attention layer. Arguments as for `init_cache`."""
    return Cache(
        groups=((_empty_attention(config, 1, batch, capacity, dtype),),),
        lengths=jnp.zeros((batch,), jnp.int32),
        capacity=capacity,
    )


def _empty_attention(
    config: TextConfig, repeats: int, batch: int, capacity: int, dtype: DTypeLike
) -> AttentionCache:
    shape = (repeats, batch, capacity, config.num_key_value_heads, config.head_dim)
    kept_as = storage_dtype(dtype)
    return AttentionCache(key=jnp.zeros(shape, kept_as), value=jnp.zeros(shape, kept_as))
