"""Nodes that stand beside the language model: multi-token prediction and the vision tower."""

from __future__ import annotations

from typing import Any

from qwen35_jax.config import TextConfig, VisionConfig
from qwen35_jax.spec import tensors
from qwen35_jax.spec.node import Node, choose
from qwen35_jax.spec.tensor_rules import MTP_LAYER_PREFIX, VISION_PREFIX

VISION_NORM_EPS = 1e-6  # of the tower's layer norms; no field of the configuration sets it


def mtp_nodes(text: TextConfig) -> list[Node]:
    shapes = tensors.mtp_outside_layer(text)
    embed = text.hidden_size
    eps = {"eps": text.rms_norm_eps}
    layer = tensors.prefixed(MTP_LAYER_PREFIX, tensors.decoder_layer(text, "full_attention"))
    layers = tuple(range(text.mtp_num_hidden_layers))
    return [
        Node(
            "mtp.fc",
            "mtp",
            "linear",
            (),
            f"2 x {embed} -> {embed}",
            "W (rms(E[next id]) (1 + w_e), rms(h) (1 + w_h)); h as after final_norm",
            {**eps, "in_features": 2 * embed, "out_features": embed},
            choose(shapes, "", "mtp.fc.", "mtp.pre_fc_norm"),
        ),
        Node(
            "mtp.layer",
            "mtp",
            "decoder layer",
            layers,
            f"{embed} -> {embed}",
            "one more layer of the attn kind; lm_head then guesses the token after the next",
            {},
            layer,
        ),
        Node(
            "mtp.norm",
            "mtp",
            "rms norm",
            (),
            f"{embed} -> {embed}",
            "rms(x) (1 + w)",
            eps,
            choose(shapes, "", "mtp.norm."),
        ),
    ]


def vision_nodes(vision: VisionConfig) -> list[Node]:
    shapes, block = tensors.vision_tower(vision), tensors.vision_block(vision)
    blocks = tuple(range(vision.depth))
    embed, inner, head_dim = vision.hidden_size, vision.intermediate_size, vision.head_dim
    pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    cells = vision.spatial_merge_size**2
    eps = {"eps": VISION_NORM_EPS}
    in_block = f"{VISION_PREFIX}blocks.{{layer}}."

    def outside(name: str, op: str, maps: str, formula: str, constants: dict[str, Any], *names: str) -> Node:
        chosen = choose(shapes, VISION_PREFIX, *names)
        return Node(f"vision.{name}", "vision", op, (), maps, formula, constants, chosen)

    def inside(name: str, op: str, maps: str, formula: str, constants: dict[str, Any], *names: str) -> Node:
        chosen = choose(block, in_block, *names)
        return Node(f"vision.{name}", "vision", op, blocks, maps, formula, constants, chosen)

    return [
        outside(
            "patch_embed",
            "linear",
            f"{pixels} -> {embed}",
            "W u + bias",
            {"patch": vision.patch_size, "frames": vision.temporal_patch_size},
            "patch_embed",
        ),
        outside(
            "pos_embed",
            "bilinear lookup",
            f"{vision.position_grid} x {vision.position_grid} -> {embed}",
            "x + the table, stretched over the image's grid of patches",
            {"grid": vision.position_grid},
            "pos_embed",
        ),
        inside("norm1", "layer norm", f"{embed} -> {embed}", "layer_norm(x) w + bias", eps, "norm1"),
        inside(
            "attn",
            "attention",
            f"{vision.num_heads} heads of {head_dim}",
            "x + W softmax(scale q k^T) v within a frame; q and k turned by row and column",
            {"scale": head_dim**-0.5, "theta": vision.rope_theta},
            "attn.",
        ),
        inside("norm2", "layer norm", f"{embed} -> {embed}", "layer_norm(x) w + bias", eps, "norm2"),
        inside(
            "mlp",
            "two linears",
            f"{embed} -> {inner} -> {embed}",
            "x + W_2 gelu_tanh(W_1 u + bias) + bias",
            {"activation": vision.hidden_act},
            "mlp.",
        ),
        outside(
            "merger",
            "two linears",
            f"{cells} x {embed} -> {vision.out_hidden_size}",
            f"W_2 gelu(W_1 (layer norms of {cells} neighbours) + bias) + bias, with the exact gelu",
            {**eps, "neighbours": cells},
            "merger.",
        ),
    ]
