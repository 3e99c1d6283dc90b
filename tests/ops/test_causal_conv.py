"""Short convolution: against a loop over tokens, with windows, padding, documents and chunks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.ops.causal_conv import causal_conv

KERNEL, HEADS, DIM = 4, 3, 2
ROWS = {
    "one document": [1] * 9,
    "right padding": [1] * 5 + [0] * 4,
    "short, right padding": [1, 1] + [0] * 7,
    "left padding": [0] * 6 + [1] * 3,
    "left and right padding": [0, 0, 2, 2, 2, 2, 0, 0, 0],
    "nothing but padding": [0] * 9,
    "documents": [1, 1, 1, 1, 1, 2, 3, 3, 3],
    "documents and padding between": [0, 1, 1, 0, 0, 2, 2, 0, 4],
    "last document shorter than the window": [1, 1, 1, 1, 1, 1, 2, 2, 0],
    "last document of one token": [0, 2, 2, 2, 2, 2, 2, 0, 1],
}
BATCH, TIME = len(ROWS), 9

conv = jax.jit(causal_conv)


def token_by_token(
    x: np.ndarray, weight: np.ndarray, window: np.ndarray, ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The definition: a window that every real token pushes itself into, emptied at a cut."""
    y, windows = np.zeros_like(x), np.zeros_like(window)
    for row in range(x.shape[0]):
        seen = list(window[row])
        id_before = None
        for t in range(x.shape[1]):
            if ids[row, t] == 0:
                continue
            if id_before is not None and ids[row, t] != id_before:
                seen = [np.zeros_like(seen[0])] * (KERNEL - 1)
            id_before = ids[row, t]
            seen.append(x[row, t])
            y[row, t] = sum(w * u for w, u in zip(weight, seen, strict=True))
            seen = seen[1:]
        windows[row] = seen
    return y, windows


@pytest.fixture
def draws() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(BATCH, TIME, HEADS, DIM)),
        "weight": rng.normal(size=(KERNEL, HEADS, DIM)),
        "window": rng.normal(size=(BATCH, KERNEL - 1, HEADS, DIM)),
        "ids": np.array(list(ROWS.values())),
    }


@pytest.mark.parametrize("time", [1, 3, TIME])
def test_padding_documents_and_windows_equal_a_walk_over_the_tokens(
    x64, draws: dict[str, np.ndarray], time: int
):
    x, weight, window, ids = draws["x"], draws["weight"], draws["window"], draws["ids"]
    for part in (slice(0, time), slice(TIME - time, TIME)):
        y, carried = conv(x[:, part], weight, window=window, segment_ids=ids[:, part])
        expected_y, expected_carried = token_by_token(x[:, part], weight, window, ids[:, part])
        np.testing.assert_allclose(y, expected_y, atol=1e-14)
        np.testing.assert_array_equal(carried, expected_carried)


@pytest.mark.parametrize("time", [2, TIME])
def test_no_segments_mean_one_document_and_no_window_means_zeros(
    x64, draws: dict[str, np.ndarray], time: int
):
    x, weight, window = draws["x"][:, :time], draws["weight"], draws["window"]
    ones = np.ones((BATCH, time), np.int32)
    for given in (window, np.zeros_like(window)):
        y, carried = conv(x, weight, window=given)
        expected_y, expected_carried = token_by_token(x, weight, given, ones)
        np.testing.assert_allclose(y, expected_y, atol=1e-14)
        np.testing.assert_array_equal(carried, expected_carried)
    for without, zeros in zip(conv(x, weight), (y, carried), strict=True):
        np.testing.assert_array_equal(without, zeros)


def test_last_tap_belongs_to_the_current_token():
    x = jnp.zeros((1, 6, 1)).at[0, 1].set(1.0)
    y, _ = conv(x, jnp.arange(1.0, 5.0)[:, None])
    np.testing.assert_array_equal(y[0, :, 0], [0, 4, 3, 2, 1, 0])


def test_b49_taps_come_first_also_when_there_are_as_many_channels():
    rng = np.random.default_rng(3)
    x, weight = rng.normal(size=(1, 7, KERNEL)), rng.normal(size=(KERNEL, KERNEL))
    y, _ = conv(x, weight)
    expected, _ = token_by_token(x, weight, np.zeros((1, KERNEL - 1, KERNEL)), np.ones((1, 7)))
    np.testing.assert_allclose(y, expected, atol=1e-5)


def test_chunks_cut_at_any_token_equal_one_call(x64, draws: dict[str, np.ndarray]):
    x, weight, window, ids = draws["x"], draws["weight"], draws["window"], draws["ids"]
    whole_y, whole_carried = conv(x, weight, window=window, segment_ids=ids)
    one_document = np.array(
        [len({i for i in row if i}) <= 1 for row in ids]
    )  # a chunk's first segment continues
    for cut in (2, 5, TIME - 1):
        first_y, carried = conv(x[:, :cut], weight, window=window, segment_ids=ids[:, :cut])
        second_y, carried = conv(x[:, cut:], weight, window=carried, segment_ids=ids[:, cut:])
        joined = np.concatenate([first_y, second_y], axis=1)
        np.testing.assert_allclose(joined[one_document], whole_y[one_document], atol=1e-14)
        np.testing.assert_array_equal(carried[one_document], whole_carried[one_document])


def test_b01_what_padding_holds_is_never_read(draws: dict[str, np.ndarray]):
    x, weight, window = (jnp.array(draws[name], jnp.float32) for name in ("x", "weight", "window"))
    ids = draws["ids"]
    spoiled = jnp.where((ids == 0)[..., None, None], jnp.nan, x)
    for clean, dirty in zip(
        conv(x, weight, window=window, segment_ids=ids),
        conv(spoiled, weight, window=window, segment_ids=ids),
        strict=True,
    ):
        np.testing.assert_array_equal(clean, dirty)

    def loss(x: jax.Array) -> jax.Array:
        y, carried = causal_conv(x, weight, window=window, segment_ids=ids)
        return jnp.sum(jnp.sin(y)) + jnp.sum(carried**2)

    gradient = np.array(jax.jit(jax.grad(loss))(x))
    assert (gradient[ids == 0] == 0).all()
    assert (gradient[ids != 0] != 0).all()


def test_b03_right_padding_leaves_the_window_of_the_real_tokens(draws: dict[str, np.ndarray]):
    x, weight, window = draws["x"][:3], draws["weight"], draws["window"][:3]
    lengths = [5, 2, 9]
    ids = (np.arange(TIME) < np.array(lengths)[:, None]).astype(np.int32)
    _, carried = conv(x, weight, window=window, segment_ids=ids)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        _, alone = conv(x[one, :length], weight, window=window[one])
        np.testing.assert_array_equal(carried[row], alone[0])


def test_b08_documents_of_a_row_equal_separate_calls_and_their_gradients(x64):
    lengths = [5, 1, 2, 8, 4]
    ids = np.repeat(np.arange(1, 6), lengths)[None]
    rng = np.random.default_rng(4)
    x, weight = rng.normal(size=(1, sum(lengths), HEADS, DIM)), rng.normal(size=(KERNEL, HEADS, DIM))

    def packed(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, _ = causal_conv(x, weight, segment_ids=jnp.array(ids))
        return jnp.sum(jnp.sin(y)), y

    def separate(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        ends = np.cumsum(lengths)
        documents = [
            causal_conv(x[:, end - length : end], weight)[0]
            for end, length in zip(ends, lengths, strict=True)
        ]
        y = jnp.concatenate(documents, axis=1)
        return jnp.sum(jnp.sin(y)), y

    (_, packed_y), packed_gradients = jax.jit(jax.value_and_grad(packed, (0, 1), has_aux=True))(x, weight)
    (_, separate_y), separate_gradients = jax.jit(jax.value_and_grad(separate, (0, 1), has_aux=True))(
        x, weight
    )
    np.testing.assert_allclose(packed_y, separate_y, atol=1e-14)
    for one, other in zip(packed_gradients, separate_gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-13)
    moved = x.copy()
    moved[0, :5] += 1
    np.testing.assert_array_equal(jax.jit(packed)(moved, weight)[1][:, 5:], packed_y[:, 5:])


def test_b21_bfloat16_sums_run_in_float32():
    # 256 + 1 + 1 + 1 = 259, but every bfloat16 sum on the way would fall back to 256.
    x = jnp.array([256.0, 1.0, 1.0, 1.0], jnp.bfloat16).reshape(1, 4, 1)
    y, carried = conv(x, jnp.ones((4, 1), jnp.bfloat16))
    assert y.dtype == carried.dtype == jnp.bfloat16
    assert y[0, 3, 0] == jnp.bfloat16(259)
    assert jnp.bfloat16(259) != 256


def test_shapes_that_do_not_fit_raise():
    x = jnp.ones((2, 5, 3))
    with pytest.raises(ValueError, match=r"weight: channel axes \(4,\)"):
        causal_conv(x, jnp.ones((4, 4)))
    with pytest.raises(ValueError, match=r"window: shape \(2, 4, 3\), expected \(2, 3, 3\)"):
        causal_conv(x, jnp.ones((4, 3)), window=jnp.ones((2, 4, 3)))
