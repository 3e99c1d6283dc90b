"""Tiny checkpoints in Hugging Face layout, written with the safetensors library.

Names and shapes are spelled out here a second time, from the documentation of the format and not from the table under
test. All sizes are distinct, so that no transposed tensor fits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

from qwen35_jax.checkpoint.parameter_tree import parameter_leaves

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
VOCAB, EMBED, MLP = 29, 20, 44
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8
KEY_HEADS, KEY_DIM, VALUE_HEADS, VALUE_DIM, KERNEL = 2, 5, 6, 7, 4
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
MOTIF = ["linear_attention"] * 3 + ["full_attention"]

COMPANIONS = """
    tokenizer.json tokenizer_config.json vocab.json merges.txt added_tokens.json special_tokens_map.json
    chat_template.jinja generation_config.json preprocessor_config.json video_preprocessor_config.json
    README.md LICENSE
""".split()
"""The small files of a published checkpoint."""

SPELLINGS = {
    "model.language_model.": "",
    "language_model.model.": "language_model.",
    "model.": "",
}
"""Prefixes of the text model that files use, each with that of the head."""


def text_config(**changes: Any) -> dict[str, Any]:
    """`text_config` of a two-motif model."""
    layer_types = changes.get("layer_types", MOTIF * 2)
    return {
        "model_type": "qwen3_5_text",
        "vocab_size": VOCAB,
        "hidden_size": EMBED,
        "intermediate_size": MLP,
        "num_hidden_layers": len(layer_types),
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "linear_key_head_dim": KEY_DIM,
        "linear_value_head_dim": VALUE_DIM,
        "linear_conv_kernel_dim": KERNEL,
        "layer_types": layer_types,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 0],
        },
        "some_key_of_a_later_version": {"kept": True},
        **changes,
    }


def config_json(*, vision: bool = True, tied: bool = False, **text: Any) -> dict[str, Any]:
    """A whole `config.json`: nested with a vision tower, or flat."""
    if not vision:
        return {"architectures": ["Qwen3_5ForCausalLM"], "tie_word_embeddings": tied, **text_config(**text)}
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": tied,
        "text_config": {"tie_word_embeddings": tied, **text_config(**text)},
        "vision_config": {
            "model_type": "qwen3_5_vision",
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": EMBED,
            "patch_size": 4,
            "temporal_patch_size": 2,
            "num_position_embeddings": 9,
        },
    }


def attention_shapes(*, bias: bool = False) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (2 * HEADS * HEAD_DIM, EMBED),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, EMBED),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, EMBED),
        "self_attn.o_proj.weight": (EMBED, HEADS * HEAD_DIM),
        "self_attn.q_norm.weight": (HEAD_DIM,),
        "self_attn.k_norm.weight": (HEAD_DIM,),
    }
    if bias:
        rows = {name: shape[0] for name, shape in shapes.items() if "_proj" in name}
        shapes |= {name.replace("weight", "bias"): (size,) for name, size in rows.items()}
    return shapes


def layer_shapes(kind: str, *, bias: bool = False) -> dict[str, tuple[int, ...]]:
    common: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (EMBED,),
        "post_attention_layernorm.weight": (EMBED,),
        "mlp.gate_proj.weight": (MLP, EMBED),
        "mlp.up_proj.weight": (MLP, EMBED),
        "mlp.down_proj.weight": (EMBED, MLP),
    }
    if kind == "full_attention":
        return common | attention_shapes(bias=bias)
    return common | {
        "linear_attn.in_proj_qkv.weight": (CHANNELS, EMBED),
        "linear_attn.in_proj_z.weight": (VALUE_HEADS * VALUE_DIM, EMBED),
        "linear_attn.in_proj_b.weight": (VALUE_HEADS, EMBED),
        "linear_attn.in_proj_a.weight": (VALUE_HEADS, EMBED),
        "linear_attn.conv1d.weight": (CHANNELS, 1, KERNEL),
        "linear_attn.A_log": (VALUE_HEADS,),
        "linear_attn.dt_bias": (VALUE_HEADS,),
        "linear_attn.norm.weight": (VALUE_DIM,),
        "linear_attn.out_proj.weight": (EMBED, VALUE_HEADS * VALUE_DIM),
    }


def tensor_shapes(
    config: dict[str, Any], *, prefix: str, mtp: bool, vision: bool
) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a checkpoint with this `config.json`."""
    text = config.get("text_config", config)
    bias = text.get("attention_bias", False)
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}embed_tokens.weight": (VOCAB, EMBED)}
    for index, kind in enumerate(text["layer_types"]):
        for name, shape in layer_shapes(kind, bias=bias).items():
            shapes[f"{prefix}layers.{index}.{name}"] = shape
    shapes[f"{prefix}norm.weight"] = (EMBED,)
    if not config["tie_word_embeddings"]:
        shapes[f"{SPELLINGS[prefix]}lm_head.weight"] = (VOCAB, EMBED)
    if mtp:
        shapes |= {
            "mtp.fc.weight": (EMBED, 2 * EMBED),
            "mtp.pre_fc_norm_embedding.weight": (EMBED,),
            "mtp.pre_fc_norm_hidden.weight": (EMBED,),
            "mtp.norm.weight": (EMBED,),
        }
        for name, shape in layer_shapes("full_attention", bias=bias).items():
            shapes[f"mtp.layers.0.{name}"] = shape
    if vision:
        shapes |= {
            "model.visual.patch_embed.proj.weight": (16, 3, 2, 4, 4),
            "model.visual.patch_embed.proj.bias": (16,),
            "model.visual.blocks.0.attn.qkv.weight": (48, 16),
        }
    return shapes


def random_tensors(shapes: dict[str, tuple[int, ...]], *, seed: int = 0) -> dict[str, np.ndarray]:
    """Values in the published mix of data types: A_log and the DeltaNet norm float32, the rest bfloat16."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes.items():
        values = rng.normal(size=shape).astype(np.float32)
        exact = name.endswith(("A_log", "linear_attn.norm.weight"))
        tensors[name] = values if exact else values.astype(BFLOAT16)
    return tensors


def write_files(
    folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], *, shards: int = 1
) -> Path:
    """Write a checkpoint; with several shards, tensors are dealt out in turn and an index is written."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=3))
    for name in COMPANIONS:
        (folder / name).write_text(f'{{"file": "{name}"}}')
    if shards == 1:
        safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        safetensors.numpy.save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return folder


def write_checkpoint(
    folder: Path,
    *,
    prefix: str = "model.language_model.",
    tied: bool = False,
    mtp: bool = True,
    vision: bool = True,
    shards: int = 1,
    seed: int = 0,
    **text: Any,
) -> dict[str, np.ndarray]:
    """Write a random checkpoint and return its tensors."""
    config = config_json(vision=vision, tied=tied, **text)
    tensors = random_tensors(tensor_shapes(config, prefix=prefix, mtp=mtp, vision=vision), seed=seed)
    write_files(folder, config, tensors, shards=shards)
    return tensors


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, read with the safetensors library."""
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= safetensors.numpy.load_file(file)
    return tensors


def same_bytes(first: np.ndarray, second: np.ndarray) -> bool:
    """Equal in shape, data type and every bit."""
    return first.shape == second.shape and first.dtype == second.dtype and first.tobytes() == second.tobytes()


def assert_same_parameters(first: dict, second: dict) -> None:
    """Two nested parameter dictionaries with the same paths, shapes, data types and bits."""
    one, two = dict(parameter_leaves(first)), dict(parameter_leaves(second))
    assert one.keys() == two.keys()
    for path, array in one.items():
        assert same_bytes(np.asarray(array), np.asarray(two[path])), path
