"""Attention: against a dense softmax per query, with documents, padding, caches and blocks; memory and NaN."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.ops import attention as attention_module
from qwen35_jax.ops.attention import attention

TIME, KV_HEADS, DIM, CAPACITY = 11, 2, 5, 13
IDS = np.array(
    [
        [1] * 11,
        [0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4],
        [7, 7, 7, 7, 7, 7, 0, 0, 0, 0, 0],
        [1, 1, 1, 2, 5, 5, 5, 5, 0, 1, 1],
        [0] * 11,
        [0, 3, 3, 0, 0, 6, 4, 4, 4, 4, 0],
    ]
)
BATCH = len(IDS)
LENGTHS = np.array([13, 4, 0, 7, 5, 1])
Draws = dict[str, np.ndarray]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that the arrays of these tests fill several times, and not evenly. They are read while tracing."""
    monkeypatch.setattr(attention_module, "QUERY_BLOCK", 4)
    monkeypatch.setattr(attention_module, "PAST_BLOCK", 3)
    monkeypatch.setattr(attention_module, "KEY_LENGTHS", 2)


def draw(ratio: int, time: int = TIME, seed: int = 0) -> Draws:
    rng = np.random.default_rng(seed)
    shapes = {
        "q": (BATCH, time, KV_HEADS * ratio, DIM),
        "k": (BATCH, time, KV_HEADS, DIM),
        "v": (BATCH, time, KV_HEADS, DIM),
        "past_k": (BATCH, CAPACITY, KV_HEADS, DIM),
        "past_v": (BATCH, CAPACITY, KV_HEADS, DIM),
    }
    return {name: rng.normal(size=shape) * 2 for name, shape in shapes.items()}


def seen(ids: np.ndarray, past_lengths: np.ndarray) -> np.ndarray:
    """[batch, query, CAPACITY + key]: which slots and tokens each query sees, token by token."""
    batch, time = ids.shape
    mask = np.zeros((batch, time, CAPACITY + time), bool)
    for row in range(batch):
        first_of_document, documents, id_before = 0, 0, None
        for t in np.flatnonzero(ids[row]):
            if id_before is not None and ids[row, t] != id_before:
                first_of_document, documents = t, documents + 1
            id_before = ids[row, t]
            mask[row, t, CAPACITY + first_of_document : CAPACITY + t + 1] = (
                ids[row, first_of_document : t + 1] != 0
            )
            if documents == 0:
                mask[row, t, : past_lengths[row]] = True
    return mask


def dense(q: jax.Array, k: jax.Array, v: jax.Array, mask: np.ndarray) -> jax.Array:
    """All scores at once; keys and values hold the cache, then the new tokens."""
    ratio = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, ratio, axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
    empty = ~mask.any(-1)[:, None, :, None]
    scores = jnp.where(mask[:, None], scores, jnp.where(empty, 0, -jnp.inf))
    return jnp.einsum("bhts,bshd->bthd", jnp.where(empty, 0, jax.nn.softmax(scores, -1)), v)


def expected(draws: Draws, mask: np.ndarray) -> np.ndarray:
    """Float64 answer of numpy, one row and head at a time."""
    keys = np.concatenate([draws["past_k"], draws["k"]], axis=1)
    values = np.concatenate([draws["past_v"], draws["v"]], axis=1)
    q = draws["q"]
    out = np.zeros_like(q)
    ratio = q.shape[2] // keys.shape[2]
    for row, head in np.ndindex(q.shape[0], q.shape[2]):
        scores = q[row, :, head] @ keys[row, :, head // ratio].T / np.sqrt(q.shape[-1])
        scores = np.where(mask[row], scores, -np.inf)
        sees = mask[row].any(-1)
        weights = np.exp(scores[sees] - scores[sees].max(-1, keepdims=True))
        out[row, sees, head] = weights / weights.sum(-1, keepdims=True) @ values[row, :, head // ratio]
    return out


def compiled() -> Callable[..., jax.Array]:
    """A fresh program each time, so that it takes the block sizes of its test."""
    return jax.jit(lambda arrays, **more: attention(**arrays, **more))


def new_only(draws: Draws) -> Draws:
    return {name: draws[name] for name in ("q", "k", "v")}


def single(draws: Draws) -> Draws:
    return {name: x.astype(np.float32) for name, x in draws.items()}


@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_documents_padding_and_cache_equal_a_dense_softmax(x64, small_blocks, ratio: int):
    draws = draw(ratio)
    out = compiled()(draws, segment_ids=IDS, past_lengths=LENGTHS)
    assert out.dtype == jnp.float64
    np.testing.assert_allclose(out, expected(draws, seen(IDS, LENGTHS)), atol=1e-13)


def test_one_block_of_queries_and_slots_equals_a_dense_softmax(x64):
    draws = draw(2)
    out = compiled()(draws, segment_ids=IDS, past_lengths=LENGTHS)
    np.testing.assert_allclose(out, expected(draws, seen(IDS, LENGTHS)), atol=1e-13)


def test_without_segments_every_token_is_real_and_of_one_document(x64, small_blocks):
    draws = draw(2)
    ones = np.ones_like(IDS)
    out = compiled()(new_only(draws))
    np.testing.assert_allclose(out, expected(draws, seen(ones, 0 * LENGTHS)), atol=1e-13)
    out = compiled()(draws, past_lengths=LENGTHS)
    np.testing.assert_allclose(out, expected(draws, seen(ones, LENGTHS)), atol=1e-13)


@pytest.mark.parametrize("ratio", [1, 3])
def test_single_new_token_reads_the_cache(x64, small_blocks, ratio: int):
    draws = draw(ratio, time=1)
    ids = np.array([[1], [1], [1], [1], [0], [1]])
    out = compiled()(draws, segment_ids=ids, past_lengths=LENGTHS)
    np.testing.assert_allclose(out, expected(draws, seen(ids, LENGTHS)), atol=1e-13)
    np.testing.assert_array_equal(out[4], 0)


@pytest.mark.parametrize("cut", [1, 6, TIME - 1])
def test_chunks_cut_at_any_token_equal_one_call(x64, small_blocks, cut: int):
    draws = draw(2)
    first = {name: draws[name][:, :cut] for name in ("q", "k", "v")}
    second = {name: draws[name][:, cut:] for name in ("q", "k", "v")}
    cache = {"past_k": np.full_like(draws["past_k"], np.nan), "past_v": np.full_like(draws["past_v"], np.nan)}
    for name in "kv":
        cache[f"past_{name}"][:, :cut] = first[name]
    rest = compiled()(second | cache, past_lengths=np.full(BATCH, cut))
    one_call = expected(draws, seen(np.ones_like(IDS), 0 * LENGTHS))
    np.testing.assert_allclose(rest, one_call[:, cut:], atol=1e-13)


def test_gradients_equal_those_of_a_dense_softmax(x64, small_blocks):
    draws = new_only(draw(3))
    mask = seen(IDS, 0 * LENGTHS)[:, :, CAPACITY:]
    weights = np.random.default_rng(5).normal(size=draws["q"].shape)
    ours = jax.jit(jax.grad(lambda a: jnp.sum(weights * attention(**a, segment_ids=IDS) ** 2)))(draws)
    theirs = jax.jit(jax.grad(lambda a: jnp.sum(weights * dense(**a, mask=mask) ** 2)))(draws)
    for name in ("q", "k", "v"):
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-12, err_msg=name)
        np.testing.assert_array_equal(ours[name][IDS == 0], 0, err_msg=name)


def test_b08_one_document_does_not_move_another_by_a_bit():
    draws = new_only(single(draw(2)))
    ids = np.repeat([[1, 2, 3]], BATCH, 0).repeat([4, 1, 6], axis=1)
    attend = compiled()
    before = attend(draws, segment_ids=ids)
    moved = attend(
        {name: x + (np.arange(TIME) < 4)[:, None, None] for name, x in draws.items()}, segment_ids=ids
    )
    np.testing.assert_array_equal(moved[:, 4:], before[:, 4:])
    assert (moved[:, :4] != before[:, :4]).any(axis=(1, 2, 3)).all()


def test_b07_nothing_to_see_gives_zeros_and_nan_in_padding_or_unused_slots_is_never_read(small_blocks):
    draws = single(draw(2))
    attend = compiled()
    gradient = jax.jit(jax.grad(lambda a: jnp.sum(attention(**a, segment_ids=IDS) ** 2)))
    clean, clean_gradients = attend(draws, segment_ids=IDS, past_lengths=LENGTHS), gradient(new_only(draws))
    np.testing.assert_array_equal(clean[IDS == 0], 0)
    padding, unused = IDS == 0, np.arange(CAPACITY) >= LENGTHS[:, None]
    for name in draws:
        draws[name][unused if name.startswith("past") else padding] = np.nan
    np.testing.assert_array_equal(attend(draws, segment_ids=IDS, past_lengths=LENGTHS), clean)
    for name, spoiled in gradient(new_only(draws)).items():
        np.testing.assert_array_equal(spoiled, clean_gradients[name], err_msg=name)
        np.testing.assert_array_equal(spoiled[padding], 0, err_msg=name)


def test_b07_nan_in_a_real_token_surfaces_where_it_is_seen():
    attend = compiled()
    for name in ("q", "k", "v", "past_k", "past_v"):
        draws = single(draw(2))
        draws[name][3, 2] = np.nan  # row 3: slot 2 is filled, token 2 ends the first document
        out = np.array(attend(draws, segment_ids=IDS, past_lengths=LENGTHS))
        sees = np.zeros((BATCH, TIME), bool)
        sees[3, :3] = [name.startswith("past")] * 2 + [True]
        assert np.isnan(out[sees]).any((1, 2)).all(), name
        assert np.isfinite(np.delete(out, 3, axis=0)).all(), name
        if not name.endswith("v"):  # a weight of 0 times NaN is NaN, so values reach further than keys
            assert np.isfinite(out[~sees]).all(), name


def test_large_scores_do_not_overflow():
    draws = single(draw(2))
    draws["q"] *= 1e4
    out = compiled()(draws, segment_ids=IDS, past_lengths=LENGTHS)
    exact = {name: x.astype(np.float64) for name, x in draws.items()}
    np.testing.assert_allclose(out, expected(exact, seen(IDS, LENGTHS)), atol=1e-2)


@pytest.mark.parametrize(("batch", "time"), [(1, 1), (2, 1), (4, 1), (1, 40), (3, 40)])
def test_bfloat16_accumulates_in_float32(batch: int, time: int):
    # Several shapes: which of XLA's bfloat16 products runs depends on them, and its CPU compiler does not have all.
    rng = np.random.default_rng(6)
    past_time, lengths = 600, np.array([550, 3, 0, 600])[:batch]
    sizes = {
        "q": (time, 4),
        "k": (time, 2),
        "v": (time, 2),
        "past_k": (past_time, 2),
        "past_v": (past_time, 2),
    }
    narrow = {
        name: jnp.array(rng.normal(size=(batch, *size, 64)), jnp.bfloat16) for name, size in sizes.items()
    }
    out = compiled()(narrow, past_lengths=lengths)
    assert out.dtype == jnp.bfloat16
    slots = np.broadcast_to((np.arange(past_time) < lengths[:, None])[:, None], (batch, time, past_time))
    causal = np.broadcast_to(np.tri(time, dtype=bool), (batch, time, time))
    exact = expected(
        {name: np.array(x, np.float64) for name, x in narrow.items()}, np.concatenate([slots, causal], axis=2)
    )
    # Weights and result are each rounded to 2^-9; sums of 600 products in bfloat16 would be off by much more.
    np.testing.assert_allclose(np.array(out, np.float64), exact, atol=2**-8 * np.abs(exact).max())


def test_memory_of_the_gradient_grows_with_time_not_with_its_square(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_module, "KEY_LENGTHS", 1)  # a smaller program to compile

    def temporary_bytes(time: int) -> int:
        q, k = (jax.ShapeDtypeStruct((1, time, heads, 8), jnp.float32) for heads in (2, 1))
        ids = jax.ShapeDtypeStruct((1, time), jnp.int32)
        gradient = jax.grad(lambda q, k, v, ids: jnp.sum(attention(q, k, v, segment_ids=ids)), (0, 1, 2))
        return jax.jit(gradient).lower(q, k, k, ids).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(8192) < 4.5 * temporary_bytes(2048)


def over_layers(arrays: dict[str, jax.Array], past_lengths: jax.Array) -> jax.Array:
    """Attention of every layer of a stacked cache, as a scanned decoder runs it."""
    layers = jnp.arange(arrays["past_k"].shape[0])
    return jax.lax.map(lambda layer: attention(**arrays, past_lengths=past_lengths, layer=layer), layers)


def test_layer_of_a_stacked_cache_equals_that_cache_alone(x64, small_blocks):
    one, other = draw(2), draw(2, seed=1)
    stacked = one | {name: np.stack([one[name], other[name]]) for name in ("past_k", "past_v")}
    first, second = jax.jit(over_layers)(stacked, LENGTHS)
    ones = np.ones_like(IDS)
    np.testing.assert_allclose(first, expected(one, seen(ones, LENGTHS)), atol=1e-13)
    other |= new_only(one)
    np.testing.assert_allclose(second, expected(other, seen(ones, LENGTHS)), atol=1e-13)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_decode_makes_no_copy_of_the_cache(dtype: jnp.dtype):
    new, past = (2, 1, 2, 8), (3, 2, 16_384, 2, 8)
    shapes = {"q": (2, 1, 4, 8), "k": new, "v": new, "past_k": past, "past_v": past}
    arrays = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    program = jax.jit(over_layers).lower(arrays, jax.ShapeDtypeStruct((2,), jnp.int32)).compile()
    keys_of_one_layer = np.prod(past[1:]) * jnp.dtype(dtype).itemsize
    assert program.memory_analysis().temp_size_in_bytes < keys_of_one_layer / 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"k": (2, 4, 3, 8)}, "q: 4 heads, expected a multiple of the 3 heads of k"),
        ({"v": (2, 4, 2, 7)}, r"v: shape \(2, 4, 2, 7\), expected \(2, 4, 2, 8\)"),
        ({"segment_ids": (2, 5)}, r"segment_ids: shape \(2, 5\), expected \(2, 4\)"),
        ({"past_k": (2, 9, 2, 8)}, "given .True, False, False., expected all three or none"),
        (
            {"past_k": (2, 9, 2, 8), "past_v": (2, 6, 2, 8), "past_lengths": (2,)},
            r"past_v: shape \(2, 6, 2, 8\)",
        ),
    ],
)
def test_shapes_that_do_not_fit_raise(change: dict[str, tuple[int, ...]], named: str):
    shapes = {"q": (2, 4, 4, 8), "k": (2, 4, 2, 8), "v": (2, 4, 2, 8)} | change
    arrays = {
        name: jnp.ones(shape, int if name in ("segment_ids", "past_lengths") else float)
        for name, shape in shapes.items()
    }
    with pytest.raises(ValueError, match=named):
        attention(**arrays)
