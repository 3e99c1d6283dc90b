"""The decoder stack: the names of its nodes, and what a motif in it holds."""

from __future__ import annotations

import math
import re

import chex
import jax
import jax.ad_checkpoint
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qwen35_jax.model import abstract_model, forward
from qwen35_jax.nn.mlp import MLP
from qwen35_jax.nn.mtp import MultiTokenPrediction
from qwen35_jax.nn.parameter import key_stream
from qwen35_jax.nn.rematerialization import Rematerialize
from tests.small_text_model import (
    FULL,
    LINEAR,
    difference,
    draw,
    logits_and_gradient,
    small_config,
    small_model,
)

NODES = """
    embed input_norm
    gdn.in_proj gdn.conv gdn.core gdn.norm gdn.out_proj
    attn.qkv_proj attn.qk_norm attn.rope attn.core attn.gate attn.o_proj
    attn_residual post_attn_norm mlp.gate_up mlp.act mlp.down mlp_residual
    final_norm lm_head mtp.fc mtp.layer mtp.norm
""".split()


def scopes(jaxpr) -> set[str]:
    """Named scopes of a traced program, those of inner programs included."""
    found = set()
    for equation in jaxpr.eqns:
        found |= set(str(equation.source_info.name_stack).split("/"))
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if isinstance(inner, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr):
                    found |= scopes(getattr(inner, "jaxpr", inner))
    return found


def test_every_node_of_the_graph_is_a_named_scope_of_the_program():
    config = small_config((LINEAR, FULL))
    graphdef, parameters = abstract_model(config, parameter_dtype="float32", dtype="float32", mtp=True)

    def run(parameters, tokens):
        model = nnx.merge(graphdef, parameters)
        hidden, _ = model(tokens)
        return model.logits(hidden), model.draft_hidden(hidden, tokens)

    traced = jax.make_jaxpr(run)(parameters, jax.ShapeDtypeStruct((2, 5), jnp.int32))
    assert set(NODES) <= scopes(traced.jaxpr)


def test_parameters_of_a_motif_are_stacked_over_its_repeats_and_the_draft_head_is_alone():
    config = small_config((LINEAR, LINEAR, FULL) * 3)
    _, parameters = abstract_model(config, parameter_dtype="float32", dtype="float32", mtp=True)
    (group,) = parameters["decoder"]["groups"].values()
    assert set(group["layers"]) == {0, 1, 2}
    assert all(leaf.shape[0] == 3 for leaf in jax.tree.leaves(group))
    assert set(group["layers"][1]["mixer"]) >= {"A_log", "conv_q"}
    assert set(group["layers"][2]["mixer"]) >= {"q_norm_weight", "gate_weight"}
    assert parameters["mtp"]["layer"]["mixer"]["q_weight"].shape == (4, 32, 40)


def kept_for_the_backward_pass(layer_types, capsys, *, rematerialize: Rematerialize) -> int:
    """Values that a gradient of the model keeps from its forward pass, inputs not counted."""
    config = small_config(layer_types)
    graphdef, parameters = abstract_model(config, parameter_dtype="float32", dtype="float32")

    def loss(parameters, tokens):
        return forward(graphdef, parameters, tokens, rematerialize=rematerialize).sum()

    jax.ad_checkpoint.print_saved_residuals(loss, parameters, jax.ShapeDtypeStruct((2, 5), jnp.int32))
    lines = capsys.readouterr().out.splitlines()
    shapes = [re.match(r"\w+\[([\d,]*)\]", line) for line in lines if "from the argument" not in line]
    return sum(math.prod(map(int, shape[1].split(","))) for shape in shapes if shape and shape[1])


@pytest.mark.parametrize("layer_types", [(LINEAR, FULL) * 3, (LINEAR, FULL, FULL, LINEAR, LINEAR)])
def test_rematerializing_keeps_a_small_part_of_the_values_of_repeated_and_of_irregular_stacks(
    layer_types, capsys
):
    everything = kept_for_the_backward_pass(layer_types, capsys, rematerialize="none")
    products = kept_for_the_backward_pass(layer_types, capsys, rematerialize="between_products")
    inputs = kept_for_the_backward_pass(layer_types, capsys, rematerialize="all")
    assert inputs < 0.6 * products and products < 0.6 * everything, (inputs, products, everything)


@pytest.mark.parametrize("layer_types", [(LINEAR, FULL) * 2, (LINEAR, FULL, FULL)])
def test_what_is_computed_again_changes_neither_logits_nor_gradients(layer_types):
    tokens = jnp.array([[7, 3, 29, 11, 5, 2], [4, 4, 17, 9, 0, 1]])
    segment_ids = jnp.array([[1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 0, 0]])
    with jax.enable_x64(True):
        model = small_model("float64", layer_types)
        cotangent = np.random.default_rng(3).standard_normal((2, 6, model.config.text.vocab_size))
        inputs = model.graphdef, model.parameters, tokens, segment_ids, cotangent
        kept, *again = (
            logits_and_gradient(*inputs, rematerialize=rematerialize)
            for rematerialize in ("none", "between_products", "all")
        )
    for found in again:
        chex.assert_trees_all_close(found, kept, rtol=1e-12, atol=1e-12)


def drawn(module: nnx.Module) -> nnx.Module:
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(draw, nnx.to_pure_dict(state)))


def test_the_feed_forward_is_silu_of_gate_times_up_through_down():
    mlp = drawn(MLP(40, 56, initializer_range=0.2, parameter_dtype="float32", keys=None))
    x = np.random.default_rng(0).standard_normal((2, 5, 40))
    gate, up, down = (
        np.asarray(weight[...], np.float64) for weight in (mlp.gate_weight, mlp.up_weight, mlp.down_weight)
    )
    z = x @ gate.T
    assert difference(mlp(jnp.float32(x)), (z / (1 + np.exp(-z)) * (x @ up.T)) @ down.T) <= 1e-5


def test_the_draft_head_fuses_the_embedding_first_and_then_the_hidden_value():
    head = drawn(MultiTokenPrediction(small_config().text, parameter_dtype="float32", keys=None))
    assert head.fc_weight.shape == (40, 2, 40)
    hidden, embedding, other = (
        jnp.asarray(np.random.default_rng(seed).standard_normal((2, 3, 40)), jnp.float32) for seed in range(3)
    )
    fc = np.asarray(head.fc_weight[...])
    pair = [np.asarray(head.embedding_norm(embedding)), np.asarray(head.hidden_norm(hidden))]
    expected = pair[0] @ fc[:, 0].T + pair[1] @ fc[:, 1].T
    seen = []
    head.layer = lambda x, context, cache: (seen.append(x) or x, cache)
    head(hidden, embedding, None, None)
    assert difference(seen[0], expected) <= 1e-5
    head(hidden, other, None, None)
    assert difference(seen[1], expected) > 0.1


def test_a_stream_of_keys_never_repeats_itself():
    stream = key_stream(jax.random.key(0))
    keys = [np.asarray(jax.random.key_data(next(stream))).tobytes() for _ in range(50)]
    assert len(set(keys)) == 50
