"""Short depthwise causal convolution over time, as in front of the delta rule."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from qwen35_jax.ops.segments import is_real, segment_index


def causal_conv(
    x: Float[Array, "batch time *channels"],
    weight: Float[Array, "kernel *channels"],
    *,
    window: Float[Array, "batch kernel-1 *channels"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
) -> tuple[Float[Array, "batch time *channels"], Float[Array, "batch kernel-1 *channels"]]:
    """y[t] = sum over j of weight[j] * x[t - (kernel - 1) + j], each channel alone; no bias, no activation.

    The last tap belongs to the current token (cross-correlation, as torch.nn.Conv1d). Padding counts as not
    there: it is read as zero, gives zero, and leaves the window as it was. A tap never reaches over a cut
    (see `ops.segments`).

    Args:
        x: inputs. There may be any number of channel axes (heads, dim).
        weight: taps, oldest first.
        window: the inputs of the kernel - 1 real tokens before this call, oldest first; zeros when None. They
            are taken to stand directly before the first real token of each row.
        segment_ids: 0 for padding, positive numbers for documents; None when every token is real and of one
            document.

    Returns:
        y, and the window for the next call: the last kernel - 1 real inputs of the last segment, zeros where
        that segment is shorter. Sums run in float32 (float64); both results have the dtype of `x`.

    Raises:
        ValueError: a shape does not fit.
    """
    batch, time, *channels = x.shape
    kernel = weight.shape[0]
    reach = kernel - 1
    if weight.shape[1:] != tuple(channels):
        raise ValueError(f"weight: channel axes {weight.shape[1:]}, expected those of x, {tuple(channels)}")
    if window is None:
        window = jnp.zeros((batch, reach, *channels), x.dtype)
    elif window.shape != (batch, reach, *channels):
        raise ValueError(f"window: shape {window.shape}, expected {(batch, reach, *channels)}")
    window = window.astype(x.dtype)

    if segment_ids is None:
        history = jnp.concatenate([window, x], axis=1)
        taps = [history[:, j : j + time] for j in range(kernel)]
        return _weighted_sum(taps, weight, x.dtype), history[:, time:]

    real = is_real(segment_ids)
    history, index = _history(x, window, segment_ids)
    taps = [
        _keep(real & (index[:, j : j + time] == index[:, reach:]), history[:, j : j + time])
        for j in range(kernel)
    ]
    return _weighted_sum(taps, weight, x.dtype), _last_inputs(history, index, real)


def next_window(
    x: Float[Array, "batch time *channels"],
    window: Float[Array, "batch kernel-1 *channels"],
    counts: Int[Array, "batch"],
) -> Float[Array, "batch kernel-1 *channels"]:
    """The window that `causal_conv` would return after the first `counts` tokens of each row, all of one document."""
    history = jnp.concatenate([window, x.astype(window.dtype)], axis=1)
    reach = window.shape[1]
    return jax.vmap(lambda row, start: lax.dynamic_slice_in_dim(row, start, reach, 0))(history, counts)


def _history(
    x: Float[Array, "batch time *channels"],
    window: Float[Array, "batch kernel-1 *channels"],
    segment_ids: Int[Array, "batch time"],
) -> tuple[Float[Array, "batch kernel-1+time *channels"], Int[Array, "batch kernel-1+time"]]:
    """All inputs, `window` directly before the first real one, and the segment of each.

    The carried window and leading padding belong to segment 0, as the first real token does.
    """
    time, reach = x.shape[1], window.shape[1]
    real = is_real(segment_ids)
    first = jnp.where(jnp.any(real, axis=1), jnp.argmax(real, axis=1), time)
    padded = jnp.pad(_keep(real, x), ((0, 0), (reach, 0)) + ((0, 0),) * (x.ndim - 2))
    history = jax.vmap(lambda row, carried, at: lax.dynamic_update_slice_in_dim(row, carried, at, 0))(
        padded, window, first
    )
    return history, jnp.pad(segment_index(segment_ids), ((0, 0), (reach, 0)))


def _last_inputs(
    history: Float[Array, "batch kernel-1+time *channels"],
    index: Int[Array, "batch kernel-1+time"],
    real: Bool[Array, "batch time"],
) -> Float[Array, "batch kernel-1 *channels"]:
    """The last kernel - 1 real inputs of each row's last segment, zeros where it is shorter."""
    time = real.shape[1]
    reach = history.shape[1] - time
    end = jnp.where(jnp.any(real, axis=1), time - jnp.argmax(real[:, ::-1], axis=1), time)
    inputs, of_segment = jax.vmap(
        lambda row, row_index, at: (
            lax.dynamic_slice_in_dim(row, at, reach, 0),
            lax.dynamic_slice_in_dim(row_index, at, reach, 0),
        )
    )(history, index, end)
    return _keep(of_segment == index[:, -1:], inputs)


def _weighted_sum(
    taps: list[Float[Array, "batch time *channels"]],
    weight: Float[Array, "kernel *channels"],
    dtype: jnp.dtype,
) -> Float[Array, "batch time *channels"]:
    wide = jnp.promote_types(jnp.promote_types(dtype, weight.dtype), jnp.float32)
    total = jnp.zeros(taps[0].shape, wide)
    for tap, tap_weight in zip(taps, weight.astype(wide), strict=True):
        # The explicit broadcast makes the weight's gradient one sum over (batch, time) together; left to the
        # product's own broadcasting it becomes a sum over time inside a batch axis of 1, which XLA's CPU
        # compiler walks with a stride, ten times slower.
        total += tap.astype(wide) * jnp.broadcast_to(tap_weight, tap.shape)
    return total.astype(dtype)


def _keep(
    mask: Bool[Array, "batch time"], x: Float[Array, "batch time *channels"]
) -> Float[Array, "batch time *channels"]:
    return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - 2)), x, 0)
