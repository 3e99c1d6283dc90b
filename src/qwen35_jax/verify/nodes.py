"""Our modules, node by node, fed with recorded values of the reference. Needs no PyTorch.

A record maps names to arrays, as described in `capture.py`. One jitted program serves all layers of a kind: layers
differ only in their parameters, which stay stacked and are picked by an index.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from qwen35_jax.cache import AttentionCache, DeltaNetCache
from qwen35_jax.config import LayerKind, TextConfig
from qwen35_jax.nn.context import TokenContext
from qwen35_jax.nn.decoder import DecoderLayer
from qwen35_jax.nn.parameter import compute_dtype_for_state
from qwen35_jax.verify.relative_error import relative_error

Record = Mapping[str, Any]
NodeErrors = dict[str, Float[Array, ""]]

# Kept in float32 (float64 in a float64 model) between calls, so they reach our modules in that dtype.
STATE_VALUES = ("state", "cos", "sin")

NODES = (
    "embed",
    "input_norm",
    "gdn.in_proj",
    "gdn.conv",
    "gdn.core",
    "gdn.norm",
    "gdn.out_proj",
    "attn.qkv_proj",
    "attn.qk_norm",
    "attn.rope",
    "attn.core",
    "attn.gate",
    "attn.o_proj",
    "attn_residual",
    "post_attn_norm",
    "mlp.gate_up",
    "mlp.act",
    "mlp.down",
    "mlp_residual",
    "final_norm",
    "lm_head",
)


def layer_graphdef(config: TextConfig, kind: LayerKind) -> nnx.GraphDef:
    """Graph definition of one decoder layer, to be merged with its slice of the stacked parameters."""
    layer = DecoderLayer(config, kind, parameter_dtype=jnp.float32, keys=None)
    return nnx.graphdef(layer)


def compute_inputs(record: Record, dtype: jnp.dtype) -> dict[str, Array]:
    """The record's values as our modules would receive them in a model of this compute dtype."""
    wide = compute_dtype_for_state(dtype)
    return {
        name: jnp.asarray(value, wide if name in STATE_VALUES else dtype) for name, value in record.items()
    }


@functools.partial(jax.jit, static_argnames=("graphdef", "dtype"))
def layer_errors(
    graphdef: nnx.GraphDef,
    stacked_parameters: dict[str, Any],
    repeat: Int[Array, ""] | int,
    record: Record,
    past_lengths: Int[Array, " batch"],
    *,
    dtype: jnp.dtype,
) -> NodeErrors:
    """Relative error of every node of one decoder layer, each fed with the reference's inputs.

    Args:
        graphdef: from `layer_graphdef`.
        stacked_parameters: of this layer in all repeats of the pattern.
        repeat: which of them.
        record: the layer's values in the reference; past keys and values are padded to a common capacity.
        past_lengths: tokens that the cache held before the call.
        dtype: compute dtype of our side.

    Returns:
        An error per node of the layer, and `layer`: the whole layer with its residuals, run from the reference's
        input and cache. The two residual nodes are plain sums, so their error says what the sum's rounding is.
    """
    layer = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[repeat], stacked_parameters))
    inputs = compute_inputs(record, dtype)
    linear = "state" in record
    mixer_errors = _delta_net_errors if linear else _attention_errors
    errors, cache, context = mixer_errors(layer.mixer, inputs, record, past_lengths)

    def compare(node: str, ours: Array, name: str) -> None:
        errors[node] = relative_error([ours], [record[name]])

    compare("input_norm", layer.input_norm(inputs["layer_in"]), "normed")
    compare("attn_residual", inputs["layer_in"] + inputs["mixed"], "residual")
    compare("post_attn_norm", layer.post_attn_norm(inputs["residual"]), "post_normed")
    gate, up = layer.mlp.gate_up(inputs["post_normed"])
    errors["mlp.gate_up"] = relative_error([gate, up], [record["mlp_gate"], record["mlp_up"]])
    compare("mlp.act", layer.mlp.act(inputs["mlp_gate"], inputs["mlp_up"]), "mlp_act")
    compare("mlp.down", layer.mlp.down(inputs["mlp_act"]), "mlp_out")
    compare("mlp_residual", inputs["residual"] + inputs["mlp_out"], "layer_out")
    output, _ = layer(inputs["layer_in"], context, cache)
    compare("layer", output, "layer_out")
    return errors


def _delta_net_errors(
    mixer: Any, inputs: dict[str, Array], record: Record, past_lengths: Int[Array, " batch"]
) -> tuple[NodeErrors, DeltaNetCache, TokenContext]:
    def of(*names: str) -> list[Array]:
        return [inputs[name] for name in names]

    def reference(*names: str) -> list[Array]:
        return [record[name] for name in names]

    windows = (inputs["window_q"], inputs["window_k"], inputs["window_v"])
    projected = of("q_proj", "k_proj", "v_proj")
    *convolved, new_windows = mixer.conv(*projected, windows, None)
    core = mixer.core(*of("q_conv", "k_conv", "v_conv", "b", "a", "state"), None)
    errors = {
        "gdn.in_proj": relative_error(
            mixer.in_proj(inputs["normed"]), reference("q_proj", "k_proj", "v_proj", "z", "b", "a")
        ),
        "gdn.conv": relative_error(
            [*convolved, *new_windows],
            reference("q_conv", "k_conv", "v_conv", "new_window_q", "new_window_k", "new_window_v"),
        ),
        "gdn.core": relative_error(core, reference("core", "new_state")),
        "gdn.norm": relative_error([mixer.norm(*of("core", "z"))], reference("core_normed")),
        "gdn.out_proj": relative_error([mixer.out_proj(inputs["core_normed"])], reference("mixed")),
    }
    # No rotary phases here: a DeltaNet layer knows the order of tokens from its recurrence alone.
    none = jnp.zeros((*inputs["layer_in"].shape[:2], 0))
    context = TokenContext(none, none, None, past_lengths)
    return errors, DeltaNetCache(*windows, inputs["state"]), context


def _attention_errors(
    mixer: Any, inputs: dict[str, Array], record: Record, past_lengths: Int[Array, " batch"]
) -> tuple[NodeErrors, AttentionCache, TokenContext]:
    def of(*names: str) -> list[Array]:
        return [inputs[name] for name in names]

    def reference(*names: str) -> list[Array]:
        return [record[name] for name in names]

    context = TokenContext(inputs["cos"], inputs["sin"], None, past_lengths)
    cache = AttentionCache(inputs["past_k"], inputs["past_v"])
    core = mixer.core(*of("q_rope", "k_rope", "v_proj"), context, cache)
    errors = {
        "attn.qkv_proj": relative_error(
            mixer.qkv_proj(inputs["normed"]), reference("q_proj", "gate", "k_proj", "v_proj")
        ),
        "attn.qk_norm": relative_error(mixer.qk_norm(*of("q_proj", "k_proj")), reference("q_norm", "k_norm")),
        "attn.rope": relative_error(
            mixer.rope(*of("q_norm", "k_norm"), context), reference("q_rope", "k_rope")
        ),
        "attn.core": relative_error([core], reference("core")),
        "attn.gate": relative_error([mixer.gate(*of("core", "gate"))], reference("gated")),
        "attn.o_proj": relative_error([mixer.o_proj(inputs["gated"])], reference("mixed")),
    }
    return errors, cache, context


@functools.partial(jax.jit, static_argnames="graphdef")
def outside_errors(
    graphdef: nnx.GraphDef, parameters: dict[str, Any], record: Record, positions: Int[Array, "batch time"]
) -> NodeErrors:
    """Relative error of the nodes outside the layers, and of the rotary phases that the layers receive.

    Args:
        graphdef: of the whole model.
        parameters: of the whole model; the layers' are not used.
        record: `tokens`, `embed`, `final_norm_in`, `final_norm`, `logits`, and `cos`, `sin` of any attention layer.
        positions: of the tokens.
    """
    model = nnx.merge(graphdef, parameters)
    context = model.context(record["tokens"], positions, None, None)

    def compute(name: str) -> Array:
        return jnp.asarray(record[name], model.dtype)

    return {
        "embed": relative_error([model.embed(record["tokens"])], [record["embed"]]),
        "attn.rope": relative_error([context.rotary_cos, context.rotary_sin], [record["cos"], record["sin"]]),
        "final_norm": relative_error([model.final_norm(compute("final_norm_in"))], [record["final_norm"]]),
        "lm_head": relative_error([model.logits(compute("final_norm"))], [record["logits"]]),
    }


def pad_past(record: Record, capacity: int) -> dict[str, np.ndarray]:
    """The record with its past keys and values padded to `capacity` slots, so that all calls share one program."""
    padded = dict(record)
    for name in ("past_k", "past_v"):
        if name in padded:
            missing = capacity - padded[name].shape[1]
            padded[name] = np.pad(padded[name], ((0, 0), (0, missing), (0, 0), (0, 0)))
    return padded
