"""Names and shapes of the tensors in a Hugging Face checkpoint, from the configuration alone.

Those of the dense language model are read from the table in `spec/tensor_rules.py`; those of the experts and of the
vision tower, which hold no parameters of this package yet, are listed here. Every matrix is `[out, in]`. Source: the
modules' state dictionaries of the reference implementation; for the `mtp.*` tensors, which it does not build, the
published checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from qwen35_jax.config import LayerKind, ModelConfig, TextConfig, VisionConfig
from qwen35_jax.spec.tensor_rules import (
    LAYER_NORMS,
    LAYER_PREFIX,
    LM_HEAD,
    MLP,
    MODEL,
    MTP,
    MTP_LAYER_PREFIX,
    VISION_PREFIX,
    Rule,
    axis_sizes,
    default_spelling,
    mixer_rules,
    tensor_shape,
)

Shape = tuple[int, ...]
Shapes = dict[str, Shape]


def hf_tensor_shapes(config: ModelConfig) -> Shapes:
    """All tensors of a checkpoint of this configuration, the multi-token-prediction head included.

    A tied output head has no tensor of its own. Mixture-of-experts weights are in the fused form of the
    published checkpoints, all experts of a layer in one tensor.
    """
    text = config.text
    shapes = outside_layers(config)
    for index, kind in enumerate(text.layer_types):
        shapes |= prefixed(layer_prefix(config).format(layer=index), decoder_layer(text, kind))
    if text.mtp_num_hidden_layers:
        shapes |= mtp_outside_layer(text)
        for index in range(text.mtp_num_hidden_layers):
            shapes |= prefixed(MTP_LAYER_PREFIX.format(layer=index), decoder_layer(text, "full_attention"))
    if config.vision is not None:
        shapes |= prefixed(VISION_PREFIX, vision_tower(config.vision))
    return shapes


def text_prefix(config: ModelConfig) -> str:
    """What the language model's tensor names begin with."""
    return default_spelling(config).text


def layer_prefix(config: ModelConfig) -> str:
    """What the names of a layer's tensors begin with; "{layer}" stands for its index."""
    return text_prefix(config) + LAYER_PREFIX


def outside_layers(config: ModelConfig) -> Shapes:
    """Embedding, last norm and, where it is not tied, output head, under their full names."""
    spelling = default_spelling(config)
    rules = MODEL if config.tie_word_embeddings else MODEL + LM_HEAD
    return {
        name.format(text=spelling.text, head=spelling.head): shape
        for name, shape in _shapes(rules, config.text).items()
    }


def _shapes(rules: Iterable[Rule], text: TextConfig) -> Shapes:
    sizes = axis_sizes(text)
    return {rule.tensor: tensor_shape(rule, sizes) for rule in rules}


def prefixed(prefix: str, shapes: Mapping[str, Shape]) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def decoder_layer(text: TextConfig, kind: LayerKind) -> Shapes:
    """One layer: norms, mixer, feed-forward."""
    return {**layer_norms(text), **mixer(text, kind), **feed_forward(text)}


def layer_norms(text: TextConfig) -> Shapes:
    return _shapes(LAYER_NORMS, text)


def mixer(text: TextConfig, kind: LayerKind) -> Shapes:
    return _shapes(mixer_rules(text, kind), text)


def feed_forward(text: TextConfig) -> Shapes:
    embed, moe = text.hidden_size, text.moe
    if moe is None:
        return _shapes(MLP, text)
    inner = moe.shared_expert_intermediate_size
    return {
        "mlp.gate.weight": (moe.num_experts, embed),
        "mlp.experts.gate_up_proj": (moe.num_experts, 2 * moe.moe_intermediate_size, embed),
        "mlp.experts.down_proj": (moe.num_experts, embed, moe.moe_intermediate_size),
        "mlp.shared_expert.gate_proj.weight": (inner, embed),
        "mlp.shared_expert.up_proj.weight": (inner, embed),
        "mlp.shared_expert.down_proj.weight": (embed, inner),
        "mlp.shared_expert_gate.weight": (1, embed),
    }


def mtp_outside_layer(text: TextConfig) -> Shapes:
    """What the multi-token-prediction head has beside its layer, under full names."""
    return _shapes(MTP, text)


def vision_tower(vision: VisionConfig) -> Shapes:
    embed, patch = vision.hidden_size, vision.patch_size
    merged = embed * vision.spatial_merge_size**2
    shapes: Shapes = {
        "patch_embed.proj.weight": (embed, vision.in_channels, vision.temporal_patch_size, patch, patch),
        "patch_embed.proj.bias": (embed,),
        "pos_embed.weight": (vision.num_position_embeddings, embed),
    }
    for index in range(vision.depth):
        shapes |= prefixed(f"blocks.{index}.", vision_block(vision))
    return {
        **shapes,
        "merger.norm.weight": (embed,),
        "merger.norm.bias": (embed,),
        **_affine("merger.linear_fc1", merged, merged),
        **_affine("merger.linear_fc2", vision.out_hidden_size, merged),
    }


def vision_block(vision: VisionConfig) -> Shapes:
    embed, inner = vision.hidden_size, vision.intermediate_size
    return {
        "norm1.weight": (embed,),
        "norm1.bias": (embed,),
        **_affine("attn.qkv", 3 * embed, embed),
        **_affine("attn.proj", embed, embed),
        "norm2.weight": (embed,),
        "norm2.bias": (embed,),
        **_affine("mlp.linear_fc1", inner, embed),
        **_affine("mlp.linear_fc2", embed, inner),
    }


def _affine(name: str, outputs: int, inputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
