"""What decays, what Muon takes, and at which rate."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

from qwen35_jax.errors import ConfigError
from qwen35_jax.model import abstract_model
from qwen35_jax.sharding import parameter_axes
from qwen35_jax.sharding.rules import LogicalAxes
from qwen35_jax.training.optimizers import OptimizerSettings, _muon_dimensions, make_optimizer, schedule
from tests.small_text_model import FULL, LINEAR, draw, small_config

UNDECAYED = ("A_log", "dt_bias", "norm", "conv_", "_bias")


def small_model():
    config = small_config((LINEAR, FULL) * 2, attention_bias=True)
    graphdef, shapes = abstract_model(config, parameter_dtype="float32", dtype="float32", mtp=True)
    return parameter_axes(graphdef, shapes), jax.tree_util.tree_map_with_path(draw, shapes)


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_b84_without_gradients_matrices_shrink_by_rate_times_decay_and_nothing_else_moves_a_bit(name):
    axes, parameters = small_model()
    settings = OptimizerSettings(
        name=name, learning_rate=0.5, schedule="constant", weight_decay=0.1, clip_norm=1.0
    )
    optimizer = make_optimizer(settings, axes, steps=10)
    updates, _ = optimizer.update(
        jax.tree.map(jnp.zeros_like, parameters), optimizer.init(parameters), parameters
    )
    after = optax.apply_updates(parameters, updates)
    paths = jax.tree_util.tree_leaves_with_path(parameters)
    moved = 0
    for (path, before), now in zip(paths, jax.tree.leaves(after), strict=True):
        written = jax.tree_util.keystr(path)
        table = name == "muon" and ("embed_tokens" in written or "lm_head" in written)
        if any(part in written for part in UNDECAYED) or table:
            np.testing.assert_array_equal(now, before, err_msg=written)
        else:
            np.testing.assert_allclose(now, before * (1 - 0.5 * 0.1), rtol=2e-6, err_msg=written)
            moved += 1
    assert moved >= 20


def test_muon_takes_the_matrices_of_the_layers_as_out_by_in():
    axes, _ = small_model()
    layers = axes["decoder"]["groups"][0]["layers"]
    assert _muon_dimensions(layers[0]["mixer"]["q_weight"]) == MuonDimensionNumbers((-1,), (-3, -2))
    assert _muon_dimensions(layers[0]["mixer"]["b_weight"]) == MuonDimensionNumbers((-1,), (-2,))
    assert _muon_dimensions(layers[0]["mixer"]["out_weight"]) == MuonDimensionNumbers((-2, -1), (-3,))
    assert _muon_dimensions(layers[1]["mlp"]["down_weight"]) == MuonDimensionNumbers((-1,), (-2,))
    assert _muon_dimensions(axes["mtp"]["fc_weight"]) == MuonDimensionNumbers((-2, -1), (-3,))
    for left_out in (
        axes["embed_tokens"]["weight"],
        layers[0]["mixer"]["conv_q"],
        layers[0]["mixer"]["A_log"],
    ):
        assert _muon_dimensions(left_out) is None


def test_a_gradient_is_clipped_by_the_norm_of_all_of_it():
    axes, parameters = small_model()
    settings = OptimizerSettings(learning_rate=1.0, schedule="constant", clip_norm=0.5)
    optimizer = make_optimizer(settings, axes, steps=10)
    small = jax.tree.map(lambda x: 1e-3 * x, parameters)
    scale = 0.5 / math.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(parameters)))
    updates = [
        optimizer.update(gradient, optimizer.init(parameters), parameters)[1]
        for gradient in (parameters, jax.tree.map(lambda x: x * scale, parameters), small)
    ]
    first, second, third = ([leaf for leaf in jax.tree.leaves(state) if leaf.ndim > 1] for state in updates)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-9)
    assert any(np.abs(np.asarray(one - other)).max() > 0 for one, other in zip(first, third, strict=True))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [0.1, 0.2, 0.3, 0.4, 0.4, 0.4]),
        ("linear", [0.1, 0.2, 0.3, 0.4, 0.4, 0.25]),
        ("cosine", [0.1, 0.2, 0.3, 0.4, 0.4, 0.25]),
    ],
)
def test_the_rate_rises_over_the_warm_up_and_falls_to_its_share(kind, expected):
    settings = OptimizerSettings(learning_rate=0.4, schedule=kind, warmup_steps=4, final_share=0.25)
    rate: Any = schedule(settings, steps=8)
    rates = [float(rate(step)) for step in (0, 1, 2, 3, 4, 6, 8)]
    middle = rates.pop(5)
    np.testing.assert_allclose(rates[:5], expected[:5], rtol=1e-6)
    if kind != "constant":
        np.testing.assert_allclose([middle, rates[5]], [expected[5], 0.1], rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "in_the_middle"), [("linear", 0.25), ("cosine", 0.2 + 0.2 * math.cos(math.pi * 3 / 8))]
)
def test_a_decay_of_the_last_steps_alone_leaves_the_highest_rate_before_it(kind, in_the_middle):
    settings = OptimizerSettings(learning_rate=0.4, schedule=kind, warmup_steps=2, decay_steps=8)
    rate: Any = schedule(settings, steps=15)
    rates = [float(rate(step)) for step in (0, 1, 2, 6, 7, 10, 15)]
    np.testing.assert_allclose(rates, [0.2, 0.4, 0.4, 0.4, 0.4, in_the_middle, 0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("change", "moves_matrices"),
    [
        ({"momentum": 0.5}, True),
        ({"learning_rate": 0.01}, True),
        ({"beta1": 0.5}, False),
        ({"adam_learning_rate": 0.01}, False),
    ],
)
def test_muon_has_momentum_and_rate_of_its_own_and_adam_the_others(change, moves_matrices):
    axes, parameters = (tree["decoder"]["groups"][0]["layers"][0]["mixer"] for tree in small_model())
    axes, parameters = (
        {name: tree[name] for name in ("q_weight", "A_log", "conv_q")} for tree in (axes, parameters)
    )
    turned = jax.tree.map(lambda leaf: jnp.flip(leaf, axis=-1), parameters)

    def second_update(settings):
        optimizer = make_optimizer(settings, axes, steps=10)
        _, state = optimizer.update(parameters, optimizer.init(parameters), parameters)
        return optimizer.update(turned, state, parameters)[0]

    settings = OptimizerSettings(
        name="muon", learning_rate=0.02, adam_learning_rate=0.02, schedule="constant"
    )
    changed = dataclasses.replace(settings, **change)
    taken = jax.tree.map(
        lambda each: _muon_dimensions(each) is not None,
        axes,
        is_leaf=lambda node: isinstance(node, LogicalAxes),
    )
    before, after = jax.jit(lambda: (second_update(settings), second_update(changed)))()
    for is_taken, left, right in zip(*map(jax.tree.leaves, (taken, before, after)), strict=True):
        assert bool(jnp.any(left != right)) == (is_taken == moves_matrices)


def test_what_cannot_be_is_refused_by_name():
    changes: dict[str, Any]
    for changes, part in (
        ({"name": "sgd"}, "optimizer.name is 'sgd', expected one of adamw, muon, adafactor"),
        ({"learning_rate": 0.0}, "optimizer.learning_rate is 0.0"),
        ({"learning_rate": math.nan}, "optimizer.learning_rate is nan"),
        ({"beta2": 1.0}, "optimizer.beta2 is 1.0"),
        ({"clip_norm": -1.0}, "optimizer.clip_norm is -1.0"),
        ({"momentum": 1.0}, "optimizer.momentum is 1.0"),
        ({"decay_steps": 0}, "optimizer.decay_steps is 0, expected at least 1"),
        ({"decay_steps": 2, "schedule": "constant"}, "optimizer.decay_steps is 2, expected none: a constant"),
        ({"final_share": 1.5}, "optimizer.final_share is 1.5"),
        ({"adam_learning_rate": 0.1}, "optimizer.adam_learning_rate is 0.1"),
    ):
        with pytest.raises(ConfigError, match=part):
            OptimizerSettings(**changes)
    with pytest.raises(ConfigError, match="warmup_steps is 11, expected no more than the 10 steps"):
        schedule(OptimizerSettings(warmup_steps=11), steps=10)
    with pytest.raises(ConfigError, match="decay_steps is 8, expected no more than the 7 steps that follow"):
        schedule(OptimizerSettings(warmup_steps=3, decay_steps=8), steps=10)
