"""The stack of decoder layers, run as one `jax.lax.scan` per repeated pattern of layers.

Parameters and caches of a pattern are stacked over its repeats, so tracing and compile time do not grow with depth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from qwen35_jax.cache import AttentionCache, LayerCache, LayerUpdate
from qwen35_jax.config import LayerKind, TextConfig
from qwen35_jax.layer_groups import layer_groups
from qwen35_jax.logical_axes import constrained
from qwen35_jax.nn.context import TokenContext
from qwen35_jax.nn.gated_attention import GatedAttention
from qwen35_jax.nn.gated_delta_net import GatedDeltaNet
from qwen35_jax.nn.mlp import MLP
from qwen35_jax.nn.norm import RMSNorm
from qwen35_jax.nn.parameter import Keys, key_stream
from qwen35_jax.nn.rematerialization import Rematerialize, rematerialized

Hidden = Float[Array, "batch time embed"]


class Mixer(Protocol):
    """What mixes over time. The cache is of the kind that this mixer keeps."""

    def __call__(self, x: Hidden, context: TokenContext, cache: Any) -> tuple[Hidden, Any]: ...


class DecoderLayer(nnx.Module):
    """A mixer over time and a feed-forward, each after a norm and onto the residual.

    Source: `Qwen3_5DecoderLayer` of the reference implementation.
    """

    def __init__(self, config: TextConfig, kind: LayerKind, *, parameter_dtype: DTypeLike, keys: Keys):
        def norm() -> RMSNorm:
            return RMSNorm(
                config.hidden_size,
                eps=config.rms_norm_eps,
                parameter_dtype=parameter_dtype,
                keys=keys,
            )

        assert config.intermediate_size is not None, "a dense model; others are refused before"
        mixer = GatedDeltaNet if kind == "linear_attention" else GatedAttention
        self.input_norm = norm()
        self.mixer: Mixer = mixer(config, parameter_dtype=parameter_dtype, keys=keys)
        self.post_attn_norm = norm()
        self.mlp = MLP(
            config.hidden_size,
            config.intermediate_size,
            initializer_range=config.initializer_range,
            parameter_dtype=parameter_dtype,
            keys=keys,
        )

    def __call__(
        self, x: Hidden, context: TokenContext, cache: LayerCache | None
    ) -> tuple[Hidden, LayerUpdate]:
        """One layer. Returns the residual stream and what the mixer remembers of these tokens."""
        with jax.named_scope("input_norm"):
            normed = self.input_norm(x)
        mixed, update = self.mixer(normed, context, cache)
        with jax.named_scope("attn_residual"):
            x = constrained(x + mixed, "batch", "time", "residual")
        with jax.named_scope("post_attn_norm"):
            normed = self.post_attn_norm(x)
        fed_forward = self.mlp(normed)
        with jax.named_scope("mlp_residual"):
            x = constrained(x + fed_forward, "batch", "time", "residual")
        return x, update


class Motif(nnx.Module):
    """One repeat of a layer pattern, written out: for the published models three DeltaNet layers, one attention."""

    def __init__(
        self,
        config: TextConfig,
        pattern: tuple[LayerKind, ...],
        *,
        parameter_dtype: DTypeLike,
        keys: Keys,
    ):
        self.layers = nnx.List(
            DecoderLayer(config, kind, parameter_dtype=parameter_dtype, keys=keys) for kind in pattern
        )

    def __call__(
        self,
        x: Hidden,
        context: TokenContext,
        caches: tuple[LayerCache, ...] | None,
        *,
        rematerialize_layers: Rematerialize,
    ) -> tuple[Hidden, tuple[LayerUpdate, ...]]:
        updates: list[LayerUpdate] = []
        for position, layer in enumerate(self.layers):
            run = rematerialized(layer, rematerialize_layers, scanned=False)
            x, update = run(x, context, None if caches is None else caches[position])
            updates.append(update)
        return x, tuple(updates)


StackUpdates = tuple[tuple[LayerUpdate, ...], ...]
"""What a call's tokens add to the memory, arranged as `Cache.groups`."""


class Decoder(nnx.Module):
    """All layers. `groups` holds one motif per layer group, its parameters stacked over the repeats."""

    def __init__(self, config: TextConfig, *, parameter_dtype: DTypeLike, keys: Keys):
        self.groups = nnx.List(
            _stack(
                lambda keys, pattern=group.pattern: Motif(
                    config, pattern, parameter_dtype=parameter_dtype, keys=keys
                ),
                group.repeats,
                keys,
            )
            for group in layer_groups(config)
        )

    def __call__(
        self,
        x: Hidden,
        context: TokenContext,
        caches: tuple[tuple[LayerCache, ...], ...] | None,
        *,
        rematerialize: Rematerialize,
    ) -> tuple[Hidden, StackUpdates | None]:
        """Runs the stack.

        Args:
            x: embedded tokens.
            context: where each token stands.
            caches: memory before these tokens, as `Cache.groups`; None keeps none and returns none.
            rematerialize: what the backward pass computes again: motif by motif where a motif is repeated, layer by
                layer where it runs once.
        """
        updates = []
        for index, stacked in enumerate(self.groups):
            graphdef, parameters = nnx.split(stacked)
            repeats = jax.tree.leaves(parameters)[0].shape[0]
            layers, motifs = (rematerialize, "none") if repeats == 1 else ("none", rematerialize)
            group = None if caches is None else caches[index]
            # Keys and values are not scanned over: that would copy their whole capacity, used or not, at every call.
            states = None if group is None else tuple(None if _is_attention(c) else c for c in group)

            def run_motif(x, scanned, graphdef=graphdef, group=group, layers=layers):
                parameters, repeat, states = scanned
                here = dataclasses.replace(context, repeat=repeat)
                memory = None if group is None else tuple(map(_present, states, group))
                motif = nnx.merge(graphdef, parameters)
                x, updates = motif(x, here, memory, rematerialize_layers=layers)
                return x, None if group is None else updates

            body = rematerialized(run_motif, motifs, scanned=True)
            x, update = jax.lax.scan(body, x, (parameters, jnp.arange(repeats), states))
            updates.append(update)
        return x, None if caches is None else tuple(updates)


def _is_attention(cache: LayerCache) -> bool:
    return isinstance(cache, AttentionCache)


def _present(scanned: LayerCache | None, whole: LayerCache) -> LayerCache:
    return whole if scanned is None else scanned


def _stack(make: Callable[[Keys], nnx.Module], repeats: int, keys: Keys) -> nnx.Module:
    """A module whose parameters are those of `repeats` independent ones, stacked on a leading axis."""
    graphdef, shapes = nnx.split(make(None))
    if keys is None:
        stacked = jax.tree.map(lambda one: jax.ShapeDtypeStruct((repeats, *one.shape), one.dtype), shapes)
    else:
        drawn_from = jax.random.split(next(keys), repeats)
        stacked = jax.vmap(lambda key: nnx.state(make(key_stream(key))))(drawn_from)
    stacked = jax.tree.map(
        lambda variable: variable.replace(axes=("repeats", *variable.axes)),
        stacked,
        is_leaf=lambda node: isinstance(node, nnx.Variable),
    )
    return nnx.merge(graphdef, stacked)
