"""A change beside a weight is the change merged into it, for every target; it is trained, and nothing else is."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from qwen35_jax.errors import ConfigError
from qwen35_jax.model import forward
from qwen35_jax.ops.low_rank import LowRankWeight
from qwen35_jax.sharding import parameter_axes, shardings
from qwen35_jax.sharding.rules import LogicalAxes
from qwen35_jax.training.lora import (
    LINEAR_MAPS,
    LoRA,
    adapter_axes,
    init_adapter,
    merged,
    with_adapter,
)
from qwen35_jax.training.objective import Batch, Objective
from qwen35_jax.training.optimizers import OptimizerSettings, is_matrix, make_optimizer
from qwen35_jax.training.train_step import init_train_state, train_step
from tests.small_text_model import FULL, LINEAR, difference, small_config, small_model

HYBRID = (LINEAR, LINEAR, LINEAR, FULL)
ALL = LoRA(rank=3, alpha=5.0)
TOKENS = np.random.default_rng(0).integers(0, 97, (2, 11))

pytestmark = pytest.mark.usefixtures("x64", "compiled_quickly")


def model():
    return small_model("float64", HYBRID, mtp=True)


def random_adapter(settings: LoRA, dtype: str = "float64") -> dict[str, Any]:
    """No `b` is 0, as it is before training."""
    adapter = init_adapter(model().config, settings, key=jax.random.key(1), dtype=dtype)
    return jax.tree_util.tree_map_with_path(drawn, adapter)


def drawn(path, array):
    rng = np.random.default_rng(zlib.crc32(jax.tree_util.keystr(path).encode()))
    return jnp.asarray(0.3 * rng.standard_normal(array.shape), array.dtype)


def only(adapter: dict[str, Any], chosen: str) -> dict[str, Any]:
    """The adapter with its `b` set to 0 but in one linear map."""
    return jax.tree_util.tree_map_with_path(
        lambda path, array: array * (chosen in keys(path) or "b" not in keys(path)), adapter
    )


def keys(path) -> list[Any]:
    return [entry.key for entry in path]


def adapted(parameters) -> dict[str, LowRankWeight]:
    leaves = jax.tree_util.tree_leaves_with_path(parameters, is_leaf=is_low_rank)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves if is_low_rank(leaf)}


def is_low_rank(node) -> bool:
    return isinstance(node, LowRankWeight)


@functools.partial(jax.jit, static_argnums=0)
def logits(graphdef, parameters):
    return forward(graphdef, parameters, jnp.asarray(TOKENS), rematerialize="none")


@functools.partial(jax.jit, static_argnums=0)
def logits_and_gradient(graphdef, adapter, parameters):
    """With the adapter beside the parameters, rematerialized; the gradient is that of some sum of the logits."""

    def weighed(adapter):
        found = forward(graphdef, with_adapter(parameters, adapter, ALL, None), jnp.asarray(TOKENS))
        return jnp.sum(found * jnp.sin(jnp.arange(found.size)).reshape(found.shape)), found

    gradient, found = jax.grad(weighed, has_aux=True)(adapter)
    return found, gradient


@pytest.mark.parametrize("target", LINEAR_MAPS)
def test_b81_merged_is_unmerged_for_each_target_alone(target):
    one = model()
    settings = dataclasses.replace(ALL, targets=(target,))
    plain = logits(one.graphdef, merged(one.parameters, random_adapter(settings), settings))
    # One program for all of them: what is not asked for is there, and 0.
    unmerged, _ = logits_and_gradient(one.graphdef, only(random_adapter(ALL), target), one.parameters)
    assert difference(unmerged, plain) <= 1e-12
    assert difference(plain, logits(one.graphdef, one.parameters)) > 1e-4


def test_b81_a_change_to_the_query_alone_leaves_the_gate_of_the_same_map():
    one = model()
    both = only(random_adapter(ALL), "q_proj")
    change = both["decoder"]["groups"][1]["layers"][0]["mixer"]["q_proj"]["b"]
    change["gate_weight"] = jnp.zeros_like(change["gate_weight"])
    whole = merged(one.parameters, both, ALL)
    unmerged, _ = logits_and_gradient(one.graphdef, both, one.parameters)
    assert difference(unmerged, logits(one.graphdef, whole)) <= 1e-12
    before, after = (tree["decoder"]["groups"][1]["layers"][0]["mixer"] for tree in (one.parameters, whole))
    np.testing.assert_array_equal(after["gate_weight"], before["gate_weight"])
    assert difference(after["q_weight"], before["q_weight"]) > 1e-2


def test_b79_all_linear_wraps_every_linear_map_of_a_hybrid_and_nothing_else():
    wrapped = adapted(with_adapter(model().parameters, random_adapter(ALL), ALL, None))
    delta_net = ["q_weight", "k_weight", "v_weight", "z_weight", "b_weight", "a_weight", "out_weight"]
    attention = ["q_weight", "gate_weight", "k_weight", "v_weight", "o_weight"]
    mlp = ["gate_weight", "up_weight", "down_weight"]
    assert set(wrapped) == {
        f"['decoder']['groups'][{group}]['layers'][0]['{part}']['{name}']"
        for group, mixer in enumerate((delta_net, attention))
        for part, names in (("mixer", mixer), ("mlp", mlp))
        for name in names
    }


def test_b79_every_b_of_all_linear_has_a_gradient_in_every_layer_from_the_first_step_on():
    one = model()
    adapter = init_adapter(one.config, ALL, key=jax.random.key(1), dtype="float64")
    found, gradient = logits_and_gradient(one.graphdef, adapter, one.parameters)
    assert difference(found, logits(one.graphdef, one.parameters)) <= 1e-12
    for path, array in jax.tree_util.tree_leaves_with_path(gradient):
        for layer in array:
            assert (np.abs(np.asarray(layer)).max() > 1e-6) == ("b" in keys(path)), keys(path)


def test_b79_a_target_that_matches_nothing_is_refused():
    attention_only = small_config((FULL, FULL))
    with pytest.raises(ConfigError, match="'in_proj_z' matches nothing in this model, which has down_proj"):
        init_adapter(attention_only, LoRA(targets=("q_proj", "in_proj_z")), key=jax.random.key(0))
    assert init_adapter(attention_only, LoRA(), key=jax.random.key(0))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"targets": ("q_proj", "conv1d")}, "lora.targets is .*conv1d.*, expected 'all-linear' or a list"),
        ({"targets": "q_proj"}, "lora.targets is 'q_proj'"),
        ({"targets": ()}, "lora.targets"),
        ({"rank": 0}, "lora.rank is 0, expected a whole number of at least 1"),
        ({"rank": 2.5}, "lora.rank"),
        ({"alpha": -1.0}, "lora.alpha"),
        ({"dropout": 1.0}, "lora.dropout"),
    ],
)
def test_wrong_settings_are_refused_by_name(wrong, message):
    with pytest.raises(ConfigError, match=message):
        LoRA(**wrong)


def test_b22_merging_keeps_every_dtype_and_what_is_not_adapted_bit_for_bit():
    parameters = jax.tree_util.tree_map_with_path(
        lambda path, array: (
            jnp.full_like(array, -4.398156, "float32")
            if keys(path)[-1] == "A_log"
            else array.astype("bfloat16")
        ),
        model().parameters,
    )
    found = merged(parameters, random_adapter(ALL, "float32"), ALL)
    changed = set(adapted(with_adapter(parameters, random_adapter(ALL), ALL, None)))
    leaves = jax.tree_util.tree_leaves_with_path(found)
    for (path, after), before in zip(leaves, jax.tree.leaves(parameters), strict=True):
        assert after.dtype == before.dtype
        assert (after is before) == (jax.tree_util.keystr(path) not in changed)
    assert found["decoder"]["groups"][0]["layers"][0]["mixer"]["A_log"].dtype == jnp.float32


def test_parts_of_one_map_drop_the_same_inputs_and_others_do_not():
    settings = dataclasses.replace(ALL, dropout=0.5)
    adapter = random_adapter(ALL)
    weights = adapted(with_adapter(model().parameters, adapter, settings, jax.random.key(3)))
    by_map: dict[int, set[tuple[bytes, ...]]] = {}
    drawn_from = {}
    for name, weight in weights.items():
        assert weight.dropout_key is not None
        words = tuple(word.tobytes() for word in np.asarray(jax.random.key_data(weight.dropout_key)))
        assert len(set(words)) == len(words) == len(weight.base), name
        by_map.setdefault(id(weight.a), set()).add(words)
        drawn_from[name] = words
    assert all(len(words) == 1 for words in by_map.values())
    assert len({words for each in by_map.values() for words in each}) == len(by_map)
    assert all(
        weight.dropout_key is None
        for weight in adapted(with_adapter(model().parameters, adapter, settings, None)).values()
    )


def test_a_step_moves_the_adapter_alone_and_drops_other_inputs_at_another_seed():
    one = model()
    settings = dataclasses.replace(ALL, dropout=0.3)
    axes = adapter_axes(random_adapter(ALL), parameter_axes(one.graphdef, one.parameters))
    adamw = OptimizerSettings(learning_rate=1e-2, schedule="constant", weight_decay=0.1)
    optimizer = make_optimizer(adamw, axes, steps=10)
    batch = Batch(*(jnp.asarray(x)[None] for x in (TOKENS, np.ones_like(TOKENS), np.ones(TOKENS.shape))))
    before = jax.tree.map(np.array, one.parameters)
    losses = []
    for seed in (4, 4, 5):
        state = init_train_state(random_adapter(ALL), optimizer, seed=seed)
        state, report = train_step(
            one.graphdef, optimizer, Objective(), state, batch, one.parameters, parameters_of=settings
        )
        losses.append(float(report.measures.loss))
    assert losses[0] == losses[1] != losses[2]
    assert bool(report.finite.all())
    jax.tree.map(np.testing.assert_array_equal, one.parameters, before)
    moved = jax.tree.map(
        lambda new, old: float(np.abs(np.asarray(new) - np.asarray(old)).max()),
        state.parameters,
        random_adapter(ALL),
    )
    assert min(jax.tree.leaves(moved)) > 1e-4


def test_axes_are_those_of_the_weights_and_optimizers_and_meshes_take_them():
    one = model()
    shapes = jax.eval_shape(lambda: init_adapter(one.config, ALL, key=jax.random.key(0)))
    axes = adapter_axes(shapes, parameter_axes(one.graphdef, one.parameters))
    layer = axes["decoder"]["groups"][0]["layers"][0]["mixer"]
    assert layer["out_proj"] == {
        "a": LogicalAxes(("repeats", "rank", "value_heads", "value_dim")),
        "b": {"out_weight": LogicalAxes(("repeats", "embed", "rank"))},
    }
    assert layer["in_proj_b"] == {
        "a": LogicalAxes(("repeats", "rank", "embed")),
        "b": {"b_weight": LogicalAxes(("repeats", "value_heads", "rank"))},
    }
    for name in ("muon", "adamw"):
        optimizer = make_optimizer(OptimizerSettings(name=name), axes, steps=3)
        jax.eval_shape(optimizer.update, shapes, jax.eval_shape(optimizer.init, shapes), shapes)
    assert all(map(is_matrix, jax.tree.leaves(axes, is_leaf=lambda node: isinstance(node, LogicalAxes))))
    mesh = AbstractMesh((2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    cut = shardings(mesh, axes, shapes)["decoder"]["groups"][0]["layers"][0]["mixer"]["in_proj_qkv"]
    assert cut["a"].spec == PartitionSpec(None, None, "fsdp")
    assert cut["b"]["v_weight"].spec == PartitionSpec(None, "tensor", None, None)


def test_a_model_that_is_not_given_is_refused():
    with pytest.raises(ConfigError, match="beside the parameters of a model"):
        ALL(random_adapter(ALL), None, None)
