"""Names and shapes of the tensors in a Hugging Face checkpoint, from the configuration alone.

Every matrix is `[out, in]`. Source: the modules' state dictionaries of the reference implementation; for the
`mtp.*` tensors, which it does not build, the published checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from qwen35_jax.config import LayerKind, ModelConfig, TextConfig, VisionConfig

Shape = tuple[int, ...]
Shapes = dict[str, Shape]

VISION_PREFIX = "model.visual."
MTP_PREFIX = "mtp."


def hf_tensor_shapes(config: ModelConfig) -> Shapes:
    """All tensors of a checkpoint of this configuration, the multi-token-prediction head included.

    A tied output head has no tensor of its own. Mixture-of-experts weights are in the fused form of the
    published checkpoints, all experts of a layer in one tensor.
    """
    text = config.text
    prefix = text_prefix(config)
    shapes: Shapes = {f"{prefix}embed_tokens.weight": (text.vocab_size, text.hidden_size)}
    for index, kind in enumerate(text.layer_types):
        shapes |= prefixed(f"{prefix}layers.{index}.", decoder_layer(text, kind))
    shapes[f"{prefix}norm.weight"] = (text.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (text.vocab_size, text.hidden_size)
    if text.mtp_num_hidden_layers:
        shapes |= prefixed(MTP_PREFIX, mtp_head(text))
    if config.vision is not None:
        shapes |= prefixed(VISION_PREFIX, vision_tower(config.vision))
    return shapes


def text_prefix(config: ModelConfig) -> str:
    """What the language model's tensor names begin with; a vision tower beside it makes it stand deeper."""
    return "model." if config.vision is None else "model.language_model."


def prefixed(prefix: str, shapes: Mapping[str, Shape]) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def size(shapes: Mapping[str, Shape]) -> int:
    """How many numbers the tensors hold."""
    return sum(math.prod(shape) for shape in shapes.values())


def decoder_layer(text: TextConfig, kind: LayerKind) -> Shapes:
    """One layer: norm, mixer, norm, feed-forward."""
    if kind == "linear_attention":
        mixer = prefixed("linear_attn.", gated_delta_net(text))
    else:
        mixer = prefixed("self_attn.", gated_attention(text))
    return {
        "input_layernorm.weight": (text.hidden_size,),
        **mixer,
        "post_attention_layernorm.weight": (text.hidden_size,),
        **prefixed("mlp.", feed_forward(text)),
    }


def gated_delta_net(text: TextConfig) -> Shapes:
    """Rows of `in_proj_qkv` (and channels of the convolution): queries, keys, values, each head by head."""
    embed, value_heads = text.hidden_size, text.linear_num_value_heads
    values = value_heads * text.linear_value_head_dim
    channels = 2 * text.linear_num_key_heads * text.linear_key_head_dim + values
    return {
        "in_proj_qkv.weight": (channels, embed),
        "in_proj_z.weight": (values, embed),
        "in_proj_b.weight": (value_heads, embed),
        "in_proj_a.weight": (value_heads, embed),
        "conv1d.weight": (channels, 1, text.linear_conv_kernel_dim),
        "A_log": (value_heads,),
        "dt_bias": (value_heads,),
        "norm.weight": (text.linear_value_head_dim,),
        "out_proj.weight": (embed, values),
    }


def gated_attention(text: TextConfig) -> Shapes:
    """Rows of `q_proj`: of each head first the query, then the output gate."""
    embed, head_dim = text.hidden_size, text.head_dim
    queries = text.num_attention_heads * head_dim
    keys = text.num_key_value_heads * head_dim
    shapes: Shapes = {
        "q_proj.weight": (2 * queries, embed),
        "k_proj.weight": (keys, embed),
        "v_proj.weight": (keys, embed),
        "o_proj.weight": (embed, queries),
        "q_norm.weight": (head_dim,),
        "k_norm.weight": (head_dim,),
    }
    if text.attention_bias:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"{name}.bias"] = shapes[f"{name}.weight"][:1]
    return shapes


def feed_forward(text: TextConfig) -> Shapes:
    embed, moe = text.hidden_size, text.moe
    if moe is None:
        assert text.intermediate_size is not None  # TextConfig has checked it
        return _swiglu(embed, text.intermediate_size)
    return {
        "gate.weight": (moe.num_experts, embed),
        "experts.gate_up_proj": (moe.num_experts, 2 * moe.moe_intermediate_size, embed),
        "experts.down_proj": (moe.num_experts, embed, moe.moe_intermediate_size),
        **prefixed("shared_expert.", _swiglu(embed, moe.shared_expert_intermediate_size)),
        "shared_expert_gate.weight": (1, embed),
    }


def _swiglu(embed: int, inner: int) -> Shapes:
    return {
        "gate_proj.weight": (inner, embed),
        "up_proj.weight": (inner, embed),
        "down_proj.weight": (embed, inner),
    }


def mtp_head(text: TextConfig) -> Shapes:
    """Columns of `fc`: first the next token's embedding, then the hidden value."""
    embed = text.hidden_size
    shapes: Shapes = {
        "fc.weight": (embed, 2 * embed),
        "pre_fc_norm_embedding.weight": (embed,),
        "pre_fc_norm_hidden.weight": (embed,),
    }
    for index in range(text.mtp_num_hidden_layers):
        shapes |= prefixed(f"layers.{index}.", decoder_layer(text, "full_attention"))
    return {**shapes, "norm.weight": (embed,)}


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
