"""The gated delta rule as plain loops over numpy float64, and the inputs that the tests feed to it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from qwen35_jax.ops.gated_delta_rule import gated_delta_rule

NAMES = ("q", "k", "v", "log_decay", "beta", "initial_state")


def loop(q, k, v, log_decay, beta, initial_state, segment_ids=None):
    """One row, one value head, one token at a time, straight from the recurrence. Returns (outputs, final state)."""
    q, k, v, log_decay, beta, initial_state = (
        np.asarray(x, np.float64) for x in (q, k, v, log_decay, beta, initial_state)
    )
    batch, time, value_heads, _ = v.shape
    group = value_heads // q.shape[2]
    outputs = np.zeros(v.shape)
    finals = np.array(initial_state)
    for row in range(batch):
        for head in range(value_heads):
            state, last_id = initial_state[row, head], None
            for t in range(time):
                if segment_ids is not None:
                    token_id = segment_ids[row, t]
                    if token_id == 0:
                        continue
                    if last_id is not None and token_id != last_id:
                        state = np.zeros_like(state)
                    last_id = token_id
                key, query = k[row, t, head // group], q[row, t, head // group]
                state = np.exp(log_decay[row, t, head]) * state
                state = state + np.outer(key, beta[row, t, head] * (v[row, t, head] - key @ state))
                outputs[row, t, head] = query @ state
            finals[row, head] = state
    return outputs, finals


def example(
    seed, *, batch, time, key_heads, group, key_dim, value_dim, decay="weak", keys="random", dtype=np.float64
):
    """Inputs by name. Rows of q and k have length 1 (q times key_dim**-0.5), as the layers prepare them.

    decay: `weak` is at most 0.05 a token, so that old state matters; `strong` up to 8; `mixed` has both and resets.
    keys: `correlated` share a direction, `repeated` come from four vectors; both make the chunk's system hard.
    """
    rng = np.random.default_rng(seed)
    shape = (batch, time, key_heads, key_dim)
    k = rng.normal(size=shape)
    if keys == "correlated":
        k = rng.normal(size=(batch, 1, key_heads, key_dim)) + 0.3 * k
    elif keys == "repeated":
        k = rng.normal(size=(4, key_dim))[rng.integers(4, size=shape[:3])]
    q = rng.normal(size=shape)
    value_heads = group * key_heads
    per_head = (batch, time, value_heads)
    log_decay = {
        "weak": -0.05 * rng.uniform(size=per_head),
        "strong": -8 * rng.uniform(size=per_head),
        "mixed": -rng.choice([0.0, 0.01, 1.0, 30.0], size=per_head, p=[0.2, 0.5, 0.2, 0.1]),
    }[decay]
    arrays = {
        "q": q / np.linalg.norm(q, axis=-1, keepdims=True) / np.sqrt(key_dim),
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": rng.normal(size=(*per_head, value_dim)),
        "log_decay": log_decay,
        "beta": rng.uniform(0.3 if keys == "random" else 0.9, 1, size=per_head),
        "initial_state": rng.normal(size=(batch, value_heads, key_dim, value_dim)),
    }
    return {name: array.astype(dtype) for name, array in arrays.items()}


def relative_error(found, expected, scale=None):
    """Largest difference over the largest magnitude expected, or over `scale`."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    scale = np.max(np.abs(expected)) if scale is None else scale
    return np.max(np.abs(found - expected)) / max(scale, np.finfo(np.float64).tiny)


def run(arrays, **options):
    """`gated_delta_rule` on inputs by name."""
    return gated_delta_rule(
        *(jnp.asarray(arrays[name]) for name in NAMES[:5]),
        initial_state=jnp.asarray(arrays["initial_state"]),
        **options,
    )


def values(arrays, segment_ids=None, *, method, chunk_size=16):
    return _values(arrays, segment_ids, method, chunk_size)


def gradients(arrays, weights, segment_ids=None, *, method, chunk_size=16):
    """Gradients of <weights[0], outputs> + <weights[1], final state> with respect to every input, by name."""
    return _gradients(arrays, weights, segment_ids, method, chunk_size)


@jax.jit(static_argnums=(2, 3))
def _values(arrays, segment_ids, method, chunk_size):
    return run(arrays, segment_ids=segment_ids, method=method, chunk_size=chunk_size)


@jax.jit(static_argnums=(3, 4))
def _gradients(arrays, weights, segment_ids, method, chunk_size):
    def loss(arrays):
        outputs, state = run(arrays, segment_ids=segment_ids, method=method, chunk_size=chunk_size)
        return jnp.vdot(weights[0], outputs) + jnp.vdot(weights[1], state)

    return jax.grad(loss)(arrays)


def weights_for(arrays, seed):
    """Random cotangents for the outputs and the final state."""
    rng = np.random.default_rng(seed + 1000)
    return tuple(
        rng.normal(size=arrays[name].shape).astype(arrays["v"].dtype) for name in ("v", "initial_state")
    )
