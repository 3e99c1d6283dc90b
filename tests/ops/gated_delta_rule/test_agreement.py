"""Every method computes the same recurrence: values, final states and all gradients, whole or in pieces."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35_jax.ops.gated_delta_rule import gated_delta_rule
from tests.ops.gated_delta_rule.oracle import (
    NAMES,
    example,
    gradients,
    loop,
    relative_error,
    values,
    weights_for,
)

METHODS = ("recurrent", "chunked", "associative")
# Few shapes, so that each compiles once: several chunks with a ragged end, less than a chunk, an odd chunk size.
SHAPES = {
    "ragged": ({"batch": 2, "time": 37, "key_heads": 3, "group": 2, "key_dim": 16, "value_dim": 12}, 16),
    "short": ({"batch": 1, "time": 7, "key_heads": 2, "group": 1, "key_dim": 4, "value_dim": 5}, 16),
    "odd": ({"batch": 1, "time": 48, "key_heads": 1, "group": 3, "key_dim": 5, "value_dim": 8}, 24),
}
LAYOUTS = {  # runs of (id, tokens), repeated or cut to the length
    "one": [(1, 1000)],
    "documents": [(1, 5), (2, 1), (3, 2), (4, 8), (5, 19)],
    "left padding": [(0, 6), (9, 1000)],
    "right padding": [(2, 3), (0, 1000)],
    "padding between": [(0, 2), (3, 4), (0, 5), (7, 6), (0, 1), (3, 9), (0, 2)],
}


def segments(layout, batch, time):
    row = np.concatenate([np.full(length, segment) for segment, length in LAYOUTS[layout] * 9])
    return np.stack([np.roll(row[: 2 * time], shift)[-time:] for shift in range(batch)]).astype(np.int32)


cases = st.fixed_dictionaries(
    {
        "shape": st.sampled_from(sorted(SHAPES)),
        "layout": st.sampled_from(sorted(LAYOUTS)),
        "decay": st.sampled_from(["weak", "strong", "mixed"]),
        "keys": st.sampled_from(["random", "correlated", "repeated"]),
        "seed": st.integers(0, 2**16),
    }
)


def build(case, dtype=np.float64):
    shape, chunk_size = SHAPES[case["shape"]]
    arrays = example(case["seed"], **shape, decay=case["decay"], keys=case["keys"], dtype=dtype)
    return arrays, segments(case["layout"], shape["batch"], shape["time"]), chunk_size


@given(case=cases)
@settings(max_examples=40)
def test_every_method_equals_the_loop_over_tokens_in_float64(case):
    with jax.enable_x64(True):
        arrays, segment_ids, chunk_size = build(case)
        expected = loop(**arrays, segment_ids=segment_ids)
        for method in METHODS if case["shape"] == "ragged" else ("chunked",):
            found = values(arrays, segment_ids, method=method, chunk_size=chunk_size)
            for name, x, y in zip(("outputs", "state"), found, expected, strict=True):
                assert x.dtype == jnp.float64
                assert relative_error(x, y) < 1e-12, (method, name)


@given(case=cases)
@settings(max_examples=25)
def test_every_method_is_within_1e_5_of_the_loop_in_float32(case):
    arrays, segment_ids, chunk_size = build({**case, "shape": "ragged"}, np.float32)
    expected = loop(**arrays, segment_ids=segment_ids)
    for method in METHODS:
        found = values(arrays, segment_ids, method=method, chunk_size=chunk_size)
        for name, x, y in zip(("outputs", "state"), found, expected, strict=True):
            assert x.dtype == jnp.float32
            assert relative_error(x, y) < 1e-5, (method, name)


@given(case=cases)
@settings(max_examples=25)
def test_every_method_has_the_same_gradients_in_float64(case):
    with jax.enable_x64(True):
        arrays, segment_ids, chunk_size = build(case)
        weights = weights_for(arrays, case["seed"])
        expected = gradients(arrays, weights, segment_ids, method="recurrent", chunk_size=chunk_size)
        for method in ("chunked", "associative") if case["shape"] == "ragged" else ("chunked",):
            found = gradients(arrays, weights, segment_ids, method=method, chunk_size=chunk_size)
            for name in NAMES:
                assert relative_error(found[name], expected[name]) < 1e-12, (method, name)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_slope_of_the_loop_over_tokens(x64, name):
    case = {"shape": "ragged", "layout": "documents", "decay": "weak", "keys": "correlated", "seed": 4}
    arrays, segment_ids, _ = build(case)
    weights = weights_for(arrays, 4)
    direction = np.random.default_rng(5).normal(size=arrays[name].shape)

    def loss(step):
        outputs, state = loop(**{**arrays, name: arrays[name] + step * direction}, segment_ids=segment_ids)
        return np.vdot(weights[0], outputs) + np.vdot(weights[1], state)

    slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
    for method in METHODS:
        found = gradients(arrays, weights, segment_ids, method=method)
        assert np.vdot(found[name], direction) == pytest.approx(slope, rel=1e-6), method


@pytest.mark.parametrize("method", ["recurrent", "chunked"])
def test_no_segment_ids_means_one_segment(x64, method):
    shape, _ = SHAPES["ragged"]
    arrays = example(1, **shape)
    ones = np.ones((shape["batch"], shape["time"]), np.int32)
    for x, y in zip(values(arrays, method=method), values(arrays, ones, method=method), strict=True):
        assert relative_error(x, y) < 1e-15


def test_no_initial_state_means_zeros():
    arrays = example(1, batch=1, time=3, key_heads=2, group=2, key_dim=8, value_dim=6, dtype=np.float32)
    expected = loop(**{**arrays, "initial_state": np.zeros_like(arrays["initial_state"])})
    found = gated_delta_rule(*(jnp.asarray(arrays[name]) for name in NAMES[:5]), method="recurrent")
    for x, y in zip(found, expected, strict=True):
        assert relative_error(x, y) < 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_padding_outputs_zero_and_hides_whatever_it_holds(x64, method):
    case = {"shape": "ragged", "layout": "padding between", "decay": "weak", "keys": "random", "seed": 2}
    arrays, segment_ids, _ = build(case)
    padding = segment_ids == 0
    poisoned = dict(arrays)
    for name in NAMES[:5]:
        poisoned[name] = arrays[name].copy()
        poisoned[name][padding] = np.nan
    clean, dirty = (values(x, segment_ids, method=method) for x in (arrays, poisoned))
    np.testing.assert_array_equal(clean[0], dirty[0])
    np.testing.assert_array_equal(clean[1], dirty[1])
    assert not np.any(np.asarray(dirty[0])[padding])
    found = gradients(poisoned, weights_for(arrays, 2), segment_ids, method=method)
    for name in NAMES:
        assert np.all(np.isfinite(found[name])), name
        assert name == "initial_state" or not np.any(np.asarray(found[name])[padding]), name


def test_b08_packed_documents_equal_separate_runs(x64):
    shape, _ = SHAPES["ragged"]
    arrays = example(8, **shape)
    weights = weights_for(arrays, 8)
    row = np.repeat([1, 2, 3, 4, 5, 0], [5, 1, 2, 8, 19, 2])
    segment_ids = np.stack([row, row]).astype(np.int32)
    outputs, state = values(arrays, segment_ids, method="chunked")
    packed = gradients(arrays, weights, segment_ids, method="chunked")
    for document in range(1, 6):
        here = row == document
        only = (segment_ids == document).astype(np.int32)
        # Only the first document of the row continues the state that came in, only the last one leaves its state.
        first, last = document == 1, document == 5
        alone = {**arrays, "initial_state": arrays["initial_state"] * first}
        alone_outputs, alone_state = loop(**alone, segment_ids=only)
        assert relative_error(outputs[:, here], alone_outputs[:, here]) < 1e-12
        if last:
            assert relative_error(state, alone_state) < 1e-12
        alone_weights = (weights[0], weights[1] * last)
        expected = gradients(alone, alone_weights, only, method="recurrent")
        for name in NAMES[:5]:
            scale = np.max(np.abs(packed[name]))
            assert relative_error(packed[name][:, here], expected[name][:, here], scale) < 1e-12, name
        if first:
            assert relative_error(packed["initial_state"], expected["initial_state"]) < 1e-12


@pytest.mark.parametrize("method", METHODS)
def test_b08_no_bit_of_a_document_depends_on_the_one_before(method):
    case = {"shape": "ragged", "layout": "documents", "decay": "weak", "keys": "random", "seed": 3}
    arrays, segment_ids, _ = build(case, np.float32)
    first = np.cumsum(np.diff(segment_ids, prepend=segment_ids[:, :1]) != 0, axis=1) == 0
    changed = {
        name: np.where(
            first.reshape(first.shape + (1,) * (arrays[name].ndim - 2)), 0.37, arrays[name]
        ).astype(np.float32)
        for name in NAMES[:5]
    }
    changed["initial_state"] = arrays["initial_state"] + 1
    outputs, state = values(arrays, segment_ids, method=method)
    other_outputs, other_state = values(changed, segment_ids, method=method)
    assert np.any(np.asarray(outputs)[first] != np.asarray(other_outputs)[first])
    np.testing.assert_array_equal(np.asarray(outputs)[~first], np.asarray(other_outputs)[~first])
    np.testing.assert_array_equal(state, other_state)


@pytest.mark.parametrize("uniform", [False, True], ids=["non-uniform decay", "uniform decay"])
def test_b16_chunks_weigh_keys_and_values_with_their_own_decays(x64, uniform):
    arrays = example(16, batch=1, time=50, key_heads=2, group=2, key_dim=8, value_dim=6)
    rng = np.random.default_rng(16)
    arrays["log_decay"] = np.full((1, 50, 4), -0.3) if uniform else -rng.uniform(0.001, 1, size=(1, 50, 4))
    for x, y in zip(values(arrays, method="chunked"), loop(**arrays), strict=True):
        assert relative_error(x, y) < 1e-12
    single = {name: x.astype(np.float32) for name, x in arrays.items()}
    for x, y in zip(values(single, method="chunked"), loop(**single), strict=True):
        assert relative_error(x, y) < 1e-6


def test_b17_no_two_axes_are_confused_where_tokens_are_as_many_as_heads(x64):
    # Sizes that all differ are the "ragged" shape above.
    arrays = example(17, batch=2, time=3, key_heads=3, group=1, key_dim=16, value_dim=12)
    for x, y in zip(values(arrays, method="chunked"), loop(**arrays), strict=True):
        assert relative_error(x, y) < 1e-12


@pytest.mark.parametrize("split", [1, 2, 3, 15, 16, 17, 33])
def test_b18_any_split_equals_one_shot(x64, split):
    arrays = example(18, batch=1, time=50, key_heads=2, group=2, key_dim=8, value_dim=6)
    head = {name: arrays[name][:, :split] for name in NAMES[:5]}
    tail = {name: arrays[name][:, split:] for name in NAMES[:5]}
    head_outputs, middle = values({**head, "initial_state": arrays["initial_state"]}, method="chunked")
    tail_outputs, end = values({**tail, "initial_state": middle}, method="chunked")
    outputs, state = values(arrays, method="chunked")
    assert relative_error(jnp.concatenate([head_outputs, tail_outputs], axis=1), outputs) < 1e-12
    assert relative_error(end, state) < 1e-12


def test_b20_prefill_then_single_steps_equals_one_shot():
    arrays = example(20, batch=1, time=50, key_heads=2, group=2, key_dim=8, value_dim=6, dtype=np.float32)
    outputs, state = values(arrays, method="chunked")
    head = {name: arrays[name][:, :33] for name in NAMES[:5]}
    pieces, running = [], arrays["initial_state"]
    piece, running = values({**head, "initial_state": running}, method="chunked")
    pieces.append(piece)
    for t in range(33, 50):
        token = {name: arrays[name][:, t : t + 1] for name in NAMES[:5]}
        piece, running = values({**token, "initial_state": running}, method="auto")
        pieces.append(piece)
    assert relative_error(jnp.concatenate(pieces, axis=1), outputs) < 1e-5
    assert relative_error(running, state) < 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_b29_value_heads_use_the_key_head_of_their_block(method):
    case = {"shape": "ragged", "layout": "one", "decay": "weak", "keys": "random", "seed": 29}
    arrays, segment_ids, _ = build(case, np.float32)
    arrays["initial_state"] *= 0
    silent = {**arrays, "k": arrays["k"].copy()}
    silent["k"][:, :, 1] = 0
    outputs, part = (np.array(values(x, segment_ids, method=method)[0]) for x in (arrays, silent))
    assert np.all(np.any(outputs[:, :, 2:4] != 0, axis=(0, 1, 3)))
    outputs[:, :, 2:4] = 0
    np.testing.assert_array_equal(part, outputs)
