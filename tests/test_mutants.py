"""B96: the checks can fail. Our model is broken in one way after another, and every broken model has to be found out.

Each mutant is a fault that someone shipped, or nearly; most give plausible text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qwen35_jax import model as text_functions
from qwen35_jax.cache import Cache
from qwen35_jax.nn import gated_attention, gated_delta_net, norm, text_model
from qwen35_jax.nn.decoder import DecoderLayer
from qwen35_jax.nn.gated_attention import GatedAttention
from qwen35_jax.nn.gated_delta_net import GatedDeltaNet
from qwen35_jax.nn.mlp import MLP
from qwen35_jax.nn.text_model import TextModel
from tests.model_checks import CHECKS

pytestmark = pytest.mark.extended


@pytest.fixture(autouse=True)
def operation_by_operation(compiled_quickly) -> Iterator[None]:
    """Nothing but single operations is compiled, some 800 of them."""
    with jax.enable_x64(True), jax.disable_jit():
        yield


Mutation = Callable[[pytest.MonkeyPatch], None]


def changed(owner: Any, name: str, change: Callable[[Callable], Callable]) -> Mutation:
    """The function or method `name` of `owner` becomes what `change` makes of it."""
    return lambda patch: patch.setattr(owner, name, change(getattr(owner, name)))


def with_arguments(owner: Any, name: str, **changes: Callable[[Any], Any]) -> Mutation:
    """Keyword arguments of an operation are passed through the given functions; None stays None."""

    def change(operation):
        def run(*arguments, **named):
            for key, function in changes.items():
                named[key] = None if named[key] is None else function(named[key])
            return operation(*arguments, **named)

        return run

    return changed(owner, name, change)


def with_inputs(owner: Any, name: str, function: Callable[..., tuple]) -> Mutation:
    """Positional arguments of an operation, `self` of a method included, are passed through `function`."""
    return changed(
        owner, name, lambda operation: lambda *inputs, **named: operation(*function(*inputs), **named)
    )


def with_output(owner: Any, name: str, function: Callable[[Any], Any]) -> Mutation:
    return changed(
        owner, name, lambda operation: lambda *inputs, **named: function(operation(*inputs, **named))
    )


def any_padding(_: Any) -> None:
    """Segment ids that are forgotten: no padding, one document."""


def no_cuts(segment_ids: jax.Array) -> jax.Array:
    return (segment_ids > 0).astype(jnp.int32)


def attention_over_tiled_heads(attention):
    def run(q, k, v, **named):
        def tile(heads):
            return None if heads is None else jnp.tile(heads, (1, 1, 2, 1))

        q, k, v = q, tile(k), tile(v)
        past = {
            name: value if value is None else jnp.tile(value, (*[1] * (value.ndim - 2), 2, 1))
            for name, value in named.items()
            if name.startswith("past_") and name != "past_lengths"
        }
        return attention(q, k, v, **(named | past))

    return run


def query_and_gate_by_halves(qkv_proj):
    def run(self, x):
        q, gate, k, v = qkv_proj(self, x)
        rows = jnp.stack([q, gate], axis=3).reshape(*q.shape[:2], 2, *q.shape[2:])
        return rows[:, :, 0], rows[:, :, 1], k, v

    return run


def gate_before_norm(_):
    def run(x, gate, weight, eps, activation):
        return norm.rms_norm(x * jax.nn.silu(gate), weight - 1, eps)

    return run


def pairs_of_neighbours(apply_rotary):
    def run(x, cos, sin):
        rotated, width = 2 * cos.shape[-1], x.shape[-1]
        halves = np.concatenate(
            [np.arange(0, rotated, 2), np.arange(1, rotated, 2), np.arange(rotated, width)]
        )
        return apply_rotary(x[..., halves], cos, sin)[..., np.argsort(halves)]

    return run


def layer_without_first_residual(_):
    def run(self, x, context, cache):
        mixed, update = self.mixer(self.input_norm(x), context, cache)
        return mixed + self.mlp(self.post_attn_norm(mixed)), update

    return run


def layer_with_parallel_parts(_):
    def run(self, x, context, cache):
        mixed, update = self.mixer(self.input_norm(x), context, cache)
        return x + mixed + self.mlp(self.post_attn_norm(x)), update

    return run


def logits_of_the_last_column(_):
    def run(graphdef, parameters, tokens, cache, segment_ids, positions):
        model = nnx.merge(graphdef, parameters)
        hidden, cache = model(tokens, positions=positions, segment_ids=segment_ids, cache=cache)
        return model.logits(hidden[:, -1]), cache

    return run


def everyone_goes_on(decode_step):
    return lambda *inputs, active: decode_step(*inputs, active=jnp.ones_like(active))


def lengths_before(extended):
    return lambda cache, updates, real: dataclasses.replace(
        extended(cache, updates, real), lengths=cache.lengths
    )


def padding_takes_slots(extended):
    return lambda cache, updates, real: dataclasses.replace(
        extended(cache, updates, jnp.ones_like(real)), lengths=cache.lengths + real.sum(axis=1)
    )


MUTANTS: dict[str, Mutation] = {
    # What is carried from call to call.
    "state dropped": with_arguments(gated_delta_net, "gated_delta_rule", initial_state=jnp.zeros_like),
    "state in half precision": with_arguments(
        gated_delta_net,
        "gated_delta_rule",
        initial_state=lambda state: state.astype(jnp.bfloat16).astype(state.dtype),
    ),
    "state not returned": changed(
        gated_delta_net,
        "gated_delta_rule",
        lambda rule: lambda *inputs, **named: (rule(*inputs, **named)[0], named["initial_state"]),
    ),
    "window dropped": with_arguments(gated_delta_net, "causal_conv", window=jnp.zeros_like),
    "window one token late": with_arguments(
        gated_delta_net, "causal_conv", window=lambda window: jnp.roll(window, 1, axis=1)
    ),
    "past not attended": with_arguments(gated_attention, "attention", past_lengths=jnp.zeros_like),
    "a slot too many attended": with_arguments(gated_attention, "attention", past_lengths=lambda n: n + 1),
    "positions start again with each call": changed(
        text_model, "segment_positions", lambda positions: lambda ids, offset: positions(ids, None)
    ),
    "lengths not counted": changed(Cache, "extended", lengths_before),
    "padding takes slots": changed(Cache, "extended", padding_takes_slots),
    "frozen rows go on": changed(text_functions, "decode_step", everyone_goes_on),
    "logits of the last column": changed(text_functions, "_extend", logits_of_the_last_column),
    # Padding and documents.
    "rule reads padding": with_arguments(gated_delta_net, "gated_delta_rule", segment_ids=any_padding),
    "rule runs over cuts": with_arguments(gated_delta_net, "gated_delta_rule", segment_ids=no_cuts),
    "convolution reads padding": with_arguments(gated_delta_net, "causal_conv", segment_ids=any_padding),
    "convolution runs over cuts": with_arguments(gated_delta_net, "causal_conv", segment_ids=no_cuts),
    "attention reads padding": with_arguments(gated_attention, "attention", segment_ids=any_padding),
    "attention runs over cuts": with_arguments(gated_attention, "attention", segment_ids=no_cuts),
    # Gated DeltaNet.
    "query and key swapped": with_inputs(
        gated_delta_net, "gated_delta_rule", lambda q, k, *rest: (k, q, *rest)
    ),
    "key heads tiled": with_inputs(
        gated_delta_net,
        "gated_delta_rule",
        lambda q, k, *rest: (jnp.tile(q, (1, 1, 2, 1)), jnp.tile(k, (1, 1, 2, 1)), *rest),
    ),
    "query not scaled": with_inputs(
        gated_delta_net, "gated_delta_rule", lambda q, *rest: (q * q.shape[-1] ** 0.5, *rest)
    ),
    "query and key not normalised": changed(gated_delta_net, "l2_normalize", lambda _: lambda x: x),
    "no decay": with_inputs(
        gated_delta_net, "gated_delta_rule", lambda q, k, v, g, beta: (q, k, v, 0 * g, beta)
    ),
    "write strength up to 2": with_inputs(
        gated_delta_net, "gated_delta_rule", lambda q, k, v, g, beta: (q, k, v, g, 2 * beta)
    ),
    "taps reversed": with_inputs(gated_delta_net, "causal_conv", lambda x, weight: (x, weight[::-1])),
    "no activation after the convolution": changed(
        GatedDeltaNet,
        "conv",
        lambda _: (
            lambda self, q, k, v, windows, ids: (
                *(
                    gated_delta_net.causal_conv(x, weight[...], window=window, segment_ids=ids)[0]
                    for x, weight, window in zip(
                        (q, k, v),
                        (self.conv_q, self.conv_k, self.conv_v),
                        windows or (None,) * 3,
                        strict=True,
                    )
                ),
                windows,
            )
        ),
    ),
    "inner norm zero-centred": with_inputs(
        gated_delta_net, "gated_rms_norm", lambda x, gate, weight, *rest: (x, gate, 1 + weight, *rest)
    ),
    "gate before the inner norm": changed(gated_delta_net, "gated_rms_norm", gate_before_norm),
    "inner gate by sigmoid": with_inputs(
        gated_delta_net, "gated_rms_norm", lambda x, gate, weight, eps, _: (x, gate, weight, eps, "sigmoid")
    ),
    # Gated attention.
    "key-value heads tiled": changed(gated_attention, "attention", attention_over_tiled_heads),
    "query and gate split by halves": changed(GatedAttention, "qkv_proj", query_and_gate_by_halves),
    "gate by silu": changed(GatedAttention, "gate", lambda _: lambda self, o, gate: o * jax.nn.silu(gate)),
    "no gate": changed(GatedAttention, "gate", lambda _: lambda self, o, gate: o),
    "scores not scaled": with_inputs(
        gated_attention, "attention", lambda q, k, v: (q * q.shape[-1] ** 0.5, k, v)
    ),
    "query and key not normed": changed(GatedAttention, "qk_norm", lambda _: lambda self, q, k: (q, k)),
    "head norms without the one": with_inputs(
        gated_attention, "rms_norm", lambda x, weight, eps: (x, weight - 1, eps)
    ),
    "not rotated": changed(gated_attention, "apply_rotary", lambda _: lambda x, cos, sin: x),
    "rotated backwards": with_inputs(gated_attention, "apply_rotary", lambda x, cos, sin: (x, cos, -sin)),
    "neighbouring channels rotated": changed(gated_attention, "apply_rotary", pairs_of_neighbours),
    # Around the mixers.
    "norms add one twice": with_inputs(norm, "rms_norm", lambda x, weight, eps: (x, weight + 1, eps)),
    "norms without the one": with_inputs(norm, "rms_norm", lambda x, weight, eps: (x, weight - 1, eps)),
    "no residual around the mixer": changed(DecoderLayer, "__call__", layer_without_first_residual),
    "mixer and feed-forward in parallel": changed(DecoderLayer, "__call__", layer_with_parallel_parts),
    "gate and up swapped": with_output(MLP, "gate_up", lambda pair: pair[::-1]),
    "head is the embedding": changed(
        TextModel, "logits", lambda _: lambda self, hidden: self.embed_tokens.logits(hidden)
    ),
    "embedding scaled": with_output(TextModel, "embed", lambda x: x * x.shape[-1] ** 0.5),
}


def test_b96_the_model_itself_passes_every_check():
    for check in CHECKS:
        check()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_b96_a_check_fails_on_the_mutant(mutant, monkeypatch):
    MUTANTS[mutant](monkeypatch)
    for check in CHECKS:
        try:
            check()
        except AssertionError:
            return
    pytest.fail(f"no check notices: {mutant}")
