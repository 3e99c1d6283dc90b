"""Models of the official implementation to compare with: random ones of a given shape, and loaded checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import save_file
from transformers import (
    DynamicCache,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)
from transformers.modeling_layers import MtpModel

from qwen35_jax.verify.float64 import float64_arithmetic, recompute_rotary_frequencies

ReferenceModel: TypeAlias = Qwen3_5ForCausalLM | Qwen3_5ForConditionalGeneration


def draw_weights(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter with random numbers under which nothing saturates, vanishes or stays at a default.

    Projections keep the variance of their input. Decays are weak (the log-decay of a token is about -0.05), so that
    the matrix state remembers across chunks and a lost state shows. Norm weights differ from their neutral value.
    All values are exact in bfloat16, so that float32, bfloat16 and float64 runs see the same numbers.

    Args:
        model: any model of the family; its parameters are overwritten in place.
        seed: of the generator.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        normal = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if name.endswith("A_log"):
            values = torch.log(
                0.1 + 0.9 * torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            )
        elif name.endswith("dt_bias"):
            values = -2.5 + 0.5 * normal
        elif name.endswith("linear_attn.norm.weight") or (".visual." in name and ".norm" in name):
            values = 1.0 + 0.2 * normal  # plain weights: neutral at one
        elif "norm" in name:
            values = 0.2 * normal  # weights that are added to one
        elif name.endswith("bias"):
            values = 0.1 * normal
        elif name.endswith("conv1d.weight"):
            values = 0.5 * normal
        elif name.endswith("embed_tokens.weight"):
            values = normal
        else:
            values = normal / math.sqrt(parameter[0].numel())
        with torch.no_grad():
            parameter.copy_(values.to(torch.bfloat16))


def random_reference(
    hf_config: dict[str, Any], seed: int, *, dtype: torch.dtype = torch.float64
) -> ReferenceModel:
    """Build a model of the official implementation with random weights.

    Args:
        hf_config: as in `config.json`; with a `text_config` the vision-language class is built, else the text class.
        seed: of the weights.
        dtype: float64 is to be used within `float64_arithmetic()`, here and in every call.

    Returns:
        The model, in evaluation mode, with eager attention.
    """
    if "text_config" in hf_config:
        model_class, config = Qwen3_5ForConditionalGeneration, Qwen3_5Config(**hf_config)
    else:
        model_class, config = Qwen3_5ForCausalLM, Qwen3_5TextConfig(**hf_config)
    model = model_class._from_config(config, attn_implementation="eager", dtype=dtype).eval()
    if dtype == torch.float64:
        recompute_rotary_frequencies(model)
    draw_weights(model, seed)
    return model


def load_reference(path: str | Path) -> Qwen3_5ForCausalLM:
    """Load the text model of a checkpoint folder into the official class, in float64.

    To be used within `float64_arithmetic()`.
    """
    model = Qwen3_5ForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager").eval()
    recompute_rotary_frequencies(model)
    return model


def random_mtp(model: ReferenceModel, seed: int) -> tuple[MtpModel, dict[str, torch.Tensor]]:
    """Build the multi-token-prediction head of the official implementation over a text model, with random weights.

    The library has the head as a generic class, which the configs of this family leave undeclared: they name its
    depth `mtp_num_hidden_layers`, the class reads `num_mtp_layers`.

    Args:
        model: a `Qwen3_5ForCausalLM`; its embedding and output head are shared, its config gains two fields.
        seed: of the weights.

    Returns:
        The head, and its weights under the names that published checkpoints give them.
    """
    model.config.num_mtp_layers = 1
    model.config.mtp_layer_types = ["full_attention"]
    head = MtpModel(model, 1).double().eval()
    head.config._attn_implementation = "eager"
    draw_weights(head.layers[0], seed)
    published = {
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "eh_proj": "fc",
        "post_norm": "norm",
        "mtp_block": "layers.0",
    }
    weights = {}
    for name, parameter in head.layers[0].named_parameters():
        part, rest = name.split(".", 1)
        weights[f"mtp.{published[part]}.{rest}"] = parameter.detach()
    return head, weights


def write_checkpoint(model: ReferenceModel, folder: Path) -> None:
    """Write a model with drawn weights as a folder in Hugging Face layout.

    The tensors are stored in bfloat16, which holds the values of `draw_weights` exactly.

    Raises:
        ValueError: a weight is no bfloat16 number, so that the file would hold another model.
    """
    tied = set(model.all_tied_weights_keys)
    weights = {}
    for name, value in model.state_dict().items():
        if name in tied:
            continue
        stored = value.to(torch.bfloat16).contiguous()
        if not torch.equal(stored.to(value.dtype), value):
            raise ValueError(
                f"{name}: found weights that bfloat16 cannot hold, expected those of draw_weights"
            )
        weights[name] = stored
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(folder)


def text_model(model: ReferenceModel) -> Any:
    """The decoder of a text or vision-language model: the module that has `embed_tokens`, `layers` and `norm`."""
    return model.get_decoder()


def new_cache(model: ReferenceModel) -> DynamicCache:
    """An empty cache for `model`."""
    return DynamicCache(config=model.config)


__all__ = [
    "ReferenceModel",
    "draw_weights",
    "float64_arithmetic",
    "load_reference",
    "new_cache",
    "random_mtp",
    "random_reference",
    "text_model",
    "write_checkpoint",
]
