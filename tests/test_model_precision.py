"""Half precision: what stays in float32 under it, and how far its answers are from those of float32."""

from __future__ import annotations

import dataclasses

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qwen35_jax.model import abstract_model, init_model
from qwen35_jax.nn.gated_delta_net import GatedDeltaNet
from tests.small_text_model import (
    ROWS,
    TIME,
    SmallModel,
    arrange,
    document,
    logits_of,
    small_config,
    small_model,
)

WIDE = {"A_log", "dt_bias", "norm_weight"}


@pytest.fixture(scope="module")
def half() -> SmallModel:
    """bfloat16 computation on float32 parameters, so that the parameters are those of the float32 model."""
    return small_model("bfloat16")


def test_b22_gates_and_inner_norm_are_float32_in_a_half_precision_model():
    config = small_config()
    wanted = {"parameter_dtype": "bfloat16", "dtype": "bfloat16", "mtp": True}
    abstract = abstract_model(config, **wanted)[1]
    drawn = jax.eval_shape(lambda: init_model(config, seed=1, **wanted)[1])
    for parameters in (abstract, drawn):
        for path, leaf in jax.tree_util.tree_leaves_with_path(parameters):
            assert leaf.dtype == ("float32" if path[-1].key in WIDE else "bfloat16"), path


def test_b22_a_decay_rate_is_used_as_it_is_stored():
    """-4.398156 becomes -4.40625 in bfloat16, which changes what is left after 4096 tokens by almost half."""
    mixer = GatedDeltaNet(small_config().text, parameter_dtype="bfloat16", keys=None)
    graphdef, parameters = nnx.split(mixer)
    gates = {"A_log": jnp.full(4, -4.398156, jnp.float32), "dt_bias": jnp.full(4, 0.25, jnp.float32)}
    mixer = nnx.merge(graphdef, nnx.to_pure_dict(parameters) | gates)
    # One token that writes nothing (v = 0) onto a state of ones, and no key to be asked for: only the decay is left.
    zeros = jnp.zeros((1, 1, 2, 16), jnp.bfloat16)
    _, state = mixer.core(
        zeros,
        zeros,
        jnp.zeros((1, 1, 4, 12), jnp.bfloat16),
        jnp.zeros((1, 1, 4), jnp.bfloat16),
        jnp.zeros((1, 1, 4), jnp.bfloat16),
        jnp.ones((1, 4, 16, 12), jnp.float32),
        None,
    )
    assert state.dtype == jnp.float32
    expected = np.exp(-np.exp(-4.398156) * np.log1p(np.exp(0.25)))
    rounded = np.exp(-np.exp(-4.40625) * np.log1p(np.exp(0.25)))
    assert abs(float(state[0, 0, 0, 0]) - expected) < 1e-6 < abs(rounded - expected)


def test_b23_the_state_in_the_cache_is_float32_after_prefill_and_steps(half):
    _, cache = half.prefill([[document(row, 30)] for row in range(ROWS)], half.new_cache())
    before = jax.tree.map(np.array, cache.groups)
    _, cache = half.step([1, 2, 3], cache)
    for group in (before, cache.groups):
        delta_net, attention = group[0]
        assert delta_net.state.dtype == jnp.float32
        # Not merely stored so: its numbers are not those of the narrow type.
        assert np.any(delta_net.state != np.asarray(delta_net.state).astype(jnp.bfloat16).astype(np.float32))
        for leaf in (
            delta_net.window_q,
            delta_net.window_k,
            delta_net.window_v,
            *dataclasses.astuple(attention),
        ):
            assert leaf.dtype == jnp.bfloat16


def equations(jaxpr, scope: str = ""):
    """Every operation of a traced program with the named scope it lies in, those of inner programs included."""
    for equation in jaxpr.eqns:
        here = f"{scope}/{equation.source_info.name_stack}"
        yield here, equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if isinstance(inner, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr):
                    yield from equations(getattr(inner, "jaxpr", inner), here)


@pytest.mark.parametrize("time", [1, TIME])
def test_b21_decay_state_and_products_of_the_rule_are_float32_at_highest_precision(time):
    config = small_config()
    graphdef, parameters = abstract_model(config, parameter_dtype="bfloat16", dtype="bfloat16")
    model = SmallModel(config, graphdef, parameters, "bfloat16")
    tokens = jax.ShapeDtypeStruct((ROWS, time), jnp.int32)

    def run(parameters, tokens, cache):
        return nnx.merge(graphdef, parameters)(tokens, segment_ids=tokens, cache=cache)

    traced = jax.make_jaxpr(run)(parameters, tokens, jax.eval_shape(model.new_cache))
    products = exponentials = 0
    for scope, equation in equations(traced.jaxpr):
        kinds = {variable.aval.dtype.name for variable in (*equation.invars, *equation.outvars)}
        if "gdn.core" in scope and equation.primitive.name == "dot_general":
            products += 1
            assert kinds == {"float32"}, equation
            assert set(equation.params["precision"]) == {jax.lax.Precision.HIGHEST}, equation
        if equation.primitive.name in ("exp", "log1p", "rsqrt", "reduce_sum", "cumsum"):
            exponentials += "gdn.core" in scope
            assert not kinds & {"bfloat16", "float16"}, equation
    assert products >= 2
    assert exponentials >= 3


def test_b20_steps_in_half_precision_are_no_farther_from_float32_than_the_forward_is(half):
    """All positions of 12 random rows: the cached path step by step, the forward in half precision, and float32."""
    exact_model = small_model("float32")
    errors_of_steps, errors_of_forward, agreeing, clear = [], [], 0, 0
    for seed in range(4):
        tokens, segment_ids = arrange([[document(10 * seed + row, TIME)] for row in range(ROWS)])
        exact = np.asarray(logits_of(exact_model.graphdef, exact_model.parameters, tokens, segment_ids))
        whole = logits_of(half.graphdef, half.parameters, tokens, segment_ids)
        assert exact.dtype == whole.dtype == np.float32
        cache, steps = half.new_cache(), []
        for at in range(TIME):
            logits, cache = half.step(tokens[:, at], cache)
            steps.append(logits)
        steps = np.stack(steps, axis=1)
        errors_of_steps.append(np.abs(steps - exact).mean())
        errors_of_forward.append(np.abs(np.asarray(whole) - exact).mean())
        first, second = np.sort(exact, axis=-1)[..., [-1, -2]].transpose(2, 0, 1)
        certain = first - second > 0.25
        clear += certain.sum()
        agreeing += (steps.argmax(axis=-1) == exact.argmax(axis=-1))[certain].sum()
        scale = np.abs(exact).mean()
    assert np.mean(errors_of_steps) <= 2 * np.mean(errors_of_forward)
    assert np.mean(errors_of_forward) <= 0.05 * scale
    assert clear > 200
    assert agreeing >= 0.99 * clear
