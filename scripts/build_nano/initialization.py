"""Starts nano's DeltaNet heads close to looking back, so that a short training is enough to learn it.

After Trockman, Harutyunyan, Kolter, Kumar and Bhojanapalli 2024, "Mimetic Initialization Helps State Space Models
Learn to Recall" (arXiv:2410.11135), carried over to the gated delta rule: in the first key head of every layer, queries
and keys start with the same projection, memory fades slowly, and values come back out the way they went in. The short
convolution shifts the keys by one token, so that a token finds what followed it earlier.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qwen35_jax.model import Parameters

EMBEDDING_SCALE = 2.5
GATE_SCALE = 4.0
OUTPUT_SCALE = 0.5
SLOW_STEP = 0.002
"""Decay per token at the start, about one over the row length."""


def mimetic(parameters: Parameters) -> Parameters:
    """Parameters with the DeltaNet layers' first key head, and the value heads that share it, set up for recall."""
    parameters = jax.tree.map(lambda leaf: leaf, parameters)
    parameters["embed_tokens"]["weight"] *= EMBEDDING_SCALE
    for group in parameters["decoder"]["groups"].values():
        for layer in group["layers"].values():
            if "A_log" in layer["mixer"]:
                layer["mixer"] = _recalling(layer["mixer"])
    return parameters


def _recalling(mixer: Parameters) -> Parameters:
    values = slice(0, mixer["v_weight"].shape[1] // mixer["q_weight"].shape[1])
    this_token = jnp.array([0.0, 0.0, 0.0, 1.0])[:, None]
    token_before = jnp.array([0.0, 0.0, 1.0, 0.0])[:, None]
    embed = mixer["v_weight"].shape[-1]
    # Unit variance of what a head sees of a normed input.
    scale = embed**-0.5 / jnp.std(mixer["v_weight"])
    q = mixer["q_weight"].at[:, 0].multiply(scale)
    v = mixer["v_weight"].at[:, values].multiply(scale)
    back = OUTPUT_SCALE * jnp.moveaxis(v[:, values], -1, 1)
    return mixer | {
        "q_weight": q,
        "k_weight": mixer["k_weight"].at[:, 0].set(q[:, 0]),
        "v_weight": v,
        "z_weight": mixer["z_weight"].at[:, values].multiply(GATE_SCALE),
        "conv_q": mixer["conv_q"].at[:, :, 0].set(this_token),
        "conv_k": mixer["conv_k"].at[:, :, 0].set(token_before),
        "conv_v": mixer["conv_v"].at[:, :, values].set(this_token[:, :, None]),
        "A_log": mixer["A_log"].at[:, values].set(0.0),
        "dt_bias": mixer["dt_bias"].at[:, values].set(jnp.log(jnp.expm1(SLOW_STEP))),
        "out_weight": mixer["out_weight"].at[:, :, values].set(back),
    }
