"""A sequence cut over four devices gives what one device gives, values and gradients, wherever documents begin."""

from __future__ import annotations

import textwrap

import pytest

from tests.several_devices import printed_by

PROGRAM = textwrap.dedent(
    """
    import json
    from functools import partial
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import AxisType
    from qwen35_jax.ops.attention import attention
    from qwen35_jax.ops.causal_conv import causal_conv
    from qwen35_jax.ops.gated_delta_rule import gated_delta_rule
    from qwen35_jax.ops import sequence_parallel as sp

    jax.config.update("jax_enable_x64", True)
    mesh = jax.make_mesh((4,), ("sequence",), axis_types=(AxisType.Auto,))
    # Parts of 6: documents that cross one and several cuts, begin with a part, end with it, lie within it; padding in
    # front, between, behind, and as a whole part; a part that holds fewer tokens than the convolution reaches back.
    SEGMENTS = np.array([
        [1] * 24,
        [1] * 6 + [2] * 6 + [3] * 6 + [2] * 6,
        [1] * 2 + [2] * 14 + [3] * 1 + [4] * 7,
        [0] * 7 + [1] * 3 + [0] * 9 + [2] * 2 + [3] * 3,
        [1] * 5 + [0] * 6 + [2] * 8 + [0] * 5,
        [1] * 11 + [2] * 13,
        [1] * 5 + [2] * 12 + [0] * 6 + [3] * 1,
        [0] * 24,
    ])
    rng = np.random.default_rng(0)
    B, T, HK, HV, DK, DV = len(SEGMENTS), 24, 2, 4, 5, 3

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape))

    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (normal(B, T, HK, DK), normal(B, T, HK, DK)))
    v, log_decay, beta = normal(B, T, HV, DV), -jnp.exp(normal(B, T, HV) - 3), jax.nn.sigmoid(normal(B, T, HV))
    x, taps = normal(B, T, 3, 2), normal(4, 3, 2)
    aq, ak, av = normal(B, T, 6, 4), normal(B, T, 2, 4), normal(B, T, 2, 4)
    ids = jnp.asarray(SEGMENTS, jnp.int32)

    def over(of_part, *, weights=0):
        def run(first, *others):
            same, with_time = others[:weights], others[weights:]
            return sp.over_parts(of_part, "sequence", first, *with_time, same=same)
        return run

    CASES = {
        "convolution": (
            lambda x, taps, ids: causal_conv(x, taps, segment_ids=ids)[0],
            over(sp.causal_conv_of_part, weights=1), (x, taps), ids,
        ),
        "delta rule": (
            lambda *a: gated_delta_rule(*a[:-1], segment_ids=a[-1])[0],
            over(sp.gated_delta_rule_of_part), (q, k, v, log_decay, beta), ids,
        ),
        "attention": (
            lambda q, k, v, ids: attention(q, k, v, segment_ids=ids),
            over(sp.attention_of_part), (aq, ak, av), ids,
        ),
    }

    def both(function, arguments, ids):
        def loss(*arguments):
            out = function(*arguments, ids)
            return jnp.sum(out * jnp.sin(jnp.arange(out.size)).reshape(out.shape)), out
        (_, out), gradients = jax.jit(
            jax.value_and_grad(loss, tuple(range(len(arguments))), has_aux=True)
        )(*arguments)
        return out, *gradients

    found = {}
    for name, (one, several, arguments, ids) in CASES.items():
        expected = both(one, arguments, ids)
        with jax.set_mesh(mesh):
            ours = both(several, arguments, ids)
        found[name] = [
            [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(ours, expected)],
            [float(np.abs(np.asarray(a) - np.asarray(b)).reshape(B, -1).max(1)[r])
             for a, b in zip(ours[:1], expected[:1]) for r in range(B)],
        ]
    print(json.dumps(found))
    """
)


@pytest.fixture(scope="module")
def found() -> dict[str, list[list[float]]]:
    return printed_by(PROGRAM, devices=4)


@pytest.mark.parametrize("name", ["convolution", "delta rule", "attention"])
def test_parts_on_four_devices_equal_the_whole_on_one(found, name):
    errors, by_row = found[name]
    assert max(errors) <= 1e-12, by_row
