"""Types, refusals, and what the compiled programs look like: their size, precision and memory."""

from __future__ import annotations

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.ops.gated_delta_rule import gated_delta_rule
from tests.ops.gated_delta_rule.oracle import NAMES, example, loop, relative_error, run, values

METHODS = ("recurrent", "chunked", "associative")
SHAPE = {"batch": 2, "time": 20, "key_heads": 2, "group": 3, "key_dim": 8, "value_dim": 5}


def abstract(time, dtype=jnp.float32, *, batch=1, key_heads=2, group=1, key_dim=32, value_dim=32):
    heads = key_heads * group
    shapes = {
        "q": (batch, time, key_heads, key_dim),
        "k": (batch, time, key_heads, key_dim),
        "v": (batch, time, heads, value_dim),
        "log_decay": (batch, time, heads),
        "beta": (batch, time, heads),
    }
    arrays = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    return arrays | {"initial_state": jax.ShapeDtypeStruct((batch, heads, key_dim, value_dim), jnp.float32)}


def loss(arrays, **options):
    outputs, state = run_abstract(arrays, **options)
    return jnp.sum(outputs) + jnp.sum(state)


def run_abstract(arrays, **options):
    return gated_delta_rule(
        *(arrays[name] for name in NAMES[:5]), initial_state=arrays["initial_state"], **options
    )


def equations(jaxpr):
    """Every equation of a program, inner programs included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)


def program(function, arrays, **options):
    return list(equations(jax.make_jaxpr(lambda arrays: function(arrays, **options))(arrays).jaxpr))


@pytest.mark.parametrize("method", METHODS)
def test_b21_half_precision_inputs_are_computed_in_float32_at_highest_precision(method):
    for function in (loss, jax.grad(loss)):
        found = program(function, abstract(40, jnp.bfloat16), method=method, chunk_size=16)
        products = [e for e in found if e.primitive.name == "dot_general"]
        assert products
        for equation in products:
            assert equation.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2
            assert all(v.aval.dtype == jnp.float32 for v in (*equation.invars, *equation.outvars))
        # bfloat16 is read and, for gradients, written: converted, moved, never computed with.
        half = {e.primitive.name for e in found if any(v.aval.dtype == jnp.bfloat16 for v in e.outvars)}
        assert half <= {"convert_element_type", "jit", "pjit", "broadcast_in_dim"}, half


def test_b21_b23_state_stays_float32_and_does_not_drift_over_2048_half_precision_tokens():
    arrays = example(21, batch=1, time=2048, key_heads=1, group=2, key_dim=8, value_dim=6, dtype=np.float32)
    half = {name: jnp.asarray(arrays[name], jnp.bfloat16) for name in NAMES[:5]}
    half["initial_state"] = arrays["initial_state"]
    errors = {}
    for time in (256, 2048):
        part = {name: x if name == "initial_state" else x[:, :time] for name, x in half.items()}
        expected = loop(**{name: np.asarray(x, np.float32) for name, x in part.items()})[1]
        for method in ("recurrent", "chunked"):
            outputs, state = values(part, method=method)
            assert outputs.dtype == state.dtype == jnp.float32
            errors[method, time] = relative_error(state, expected)
    for method in ("recurrent", "chunked"):
        assert errors[method, 2048] < 1e-5
        assert errors[method, 2048] <= 2 * errors[method, 256] + 1e-6


REFUSED = {
    "state transposed": (
        {"initial_state": lambda x: x.swapaxes(2, 3)},
        r"initial_state has shape .*expected",
    ),
    "state in half precision": (
        {"initial_state": lambda x: x.astype(jnp.bfloat16)},
        "initial_state is bfloat16; expected float32",
    ),
    "keys with fewer tokens": ({"k": lambda x: x[:, :-1]}, "k has shape"),
    "values of another batch": ({"v": lambda x: x[:1]}, "v has shape"),
    "decays of the wrong heads": ({"log_decay": lambda x: x[..., :2]}, "log_decay has shape"),
    "strengths without heads": ({"beta": lambda x: x[..., 0]}, "beta has shape"),
    "value heads not a multiple": (
        {"v": lambda x: x[:, :, :5]},
        "v has 5 heads and q 2; expected a multiple",
    ),
    "no head axis": ({"q": lambda x: x[:, :, 0]}, "q has shape"),
    "no tokens": ({name: lambda x: x[:, :0] for name in NAMES[:5]}, "q has no tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_b24_inputs_of_another_shape_or_type_are_refused(case):
    changes, message = REFUSED[case]
    arrays = example(24, **SHAPE, dtype=np.float32)
    arrays |= {name: change(jnp.asarray(arrays[name])) for name, change in changes.items()}
    with pytest.raises(ValueError, match=message):
        run(arrays)


def test_unknown_methods_chunk_sizes_and_segments_are_refused():
    arrays = example(24, **SHAPE, dtype=np.float32)
    with pytest.raises(ValueError, match="method is 'fast'; expected one of auto, recurrent"):
        run(arrays, method="fast")
    with pytest.raises(ValueError, match="chunk_size is 0"):
        run(arrays, chunk_size=0)
    with pytest.raises(ValueError, match="segment_ids has shape"):
        run(arrays, segment_ids=jnp.ones((2, 19), jnp.int32))


@pytest.mark.parametrize("function", [loss, jax.grad(loss)], ids=["forward", "gradient"])
def test_b94_the_program_does_not_grow_with_the_sequence(function):
    short, long = (len(program(function, abstract(time), method="chunked")) for time in (512, 4096))
    assert long <= 1.2 * short


def test_b94_one_token_is_a_small_program_without_a_loop():
    found = program(run_abstract, abstract(1))
    names = {e.primitive.name for e in found}
    assert not names & {"scan", "while", "pad", "cumsum"}
    assert sum(e.primitive.name == "dot_general" for e in found) == 2
    assert len(found) < 50


def test_several_tokens_take_the_chunk_loop_by_default():
    assert any(e.primitive.name == "scan" for e in program(run_abstract, abstract(130)))


def test_grouped_heads_share_their_key_head_without_a_copy():
    # 8 value heads on 2 key heads: a repeated key of a chunk would hold 16 * 8 * 64 numbers.
    arrays = abstract(32, key_heads=2, group=4, key_dim=64, value_dim=4)
    for function in (loss, jax.grad(loss)):
        found = program(function, arrays, method="chunked", chunk_size=16)
        assert max(v.aval.size for e in found for v in e.outvars) < 16 * 8 * 64
        # Products of queries and keys, size x size, exist per key head only.
        shapes = [e.outvars[0].aval.shape for e in found if e.primitive.name == "dot_general"]
        assert (1, 2, 16, 16) in shapes


def test_the_backward_pass_keeps_a_state_per_chunk_not_per_token():
    arrays = abstract(1024)
    state = 2 * 32 * 32 * 4
    inputs = sum(x.size * 4 for x in arrays.values())
    temporary = {}
    for method in ("recurrent", "chunked"):
        compiled = jax.jit(lambda x, m=method: jax.grad(loss)(x, method=m)).lower(arrays).compile()
        temporary[method] = compiled.memory_analysis().temp_size_in_bytes
    assert temporary["recurrent"] > 1024 * state
    assert temporary["chunked"] < 3 * (1024 // 64) * state + 2 * inputs
