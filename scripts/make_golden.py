"""Writes tests/golden/: a tiny model and what the official implementation computes with it in float64.

    python scripts/make_golden.py [--out tests/golden]

Needs the `reference` extra. The files are committed, so that the tests compare with the official implementation
without PyTorch; this script is run again only when the comparison grows. Running it twice gives the same bytes.

    model/                  the tiny model in Hugging Face layout (weights in bfloat16, MTP head included)
    forward.safetensors     logits of whole sequences: plain, three-axis rotary positions, padded left and right; MTP
    cache.safetensors       prefill, its cache, single steps behind it, several tokens behind it, a two-token prompt
    gradients.safetensors   a loss and its gradient for every weight
    nodes.safetensors       every node's inputs and outputs in one layer of each kind, behind a cache

Names within a file are group/value. The dims of the model are all different, value heads are twice the key heads, key
and value dims differ, and decays are weak, so that a mistaken axis, head map or lost state cannot pass.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import save_file as save_torch
from transformers.cache_utils import MtpCache

from qwen35_jax.verify.capture import record_call
from qwen35_jax.verify.float64 import float64_arithmetic
from qwen35_jax.verify.reference import new_cache, random_mtp, random_reference

VOCAB = 53
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 20,
    "intermediate_size": 28,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 1],
        "mrope_interleaved": True,
    },
}
Arrays = dict[str, np.ndarray]


def numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy().copy()


def image_positions(batch: int, time: int) -> np.ndarray:
    """Rotary positions [3, batch, time] of text, a 3 x 4 image and text again; rows start at different positions."""
    grid = np.array([(6, 6 + row, 6 + column) for row in range(3) for column in range(4)])
    before, after = np.arange(6), np.arange(10, 10 + time - 6 - len(grid))
    one_row = np.concatenate([np.stack([before] * 3, -1), grid, np.stack([after] * 3, -1)])
    offsets = 5 * np.arange(batch)
    return (one_row.T[:, None, :] + offsets[None, :, None]).astype(np.int64)


def cache_arrays(group: str, cache: Any, kinds: list[str]) -> Arrays:
    """The reference's cache, layer by layer, in its own axis order, without the conv column that is never read."""
    arrays: Arrays = {}
    for i, (kind, layer) in enumerate(zip(kinds, cache.layers, strict=True)):
        if kind == "linear_attention":
            arrays[f"{group}/layer{i}/conv"] = numpy(layer.conv_states[0][..., 1:])
            arrays[f"{group}/layer{i}/state"] = numpy(layer.recurrent_states[0])
        else:
            arrays[f"{group}/layer{i}/key"] = numpy(layer.keys)
            arrays[f"{group}/layer{i}/value"] = numpy(layer.values)
    return arrays


def forward(model: Any, mtp: Any, draw: np.random.Generator) -> Arrays:
    """Whole sequences: plain text, rotary positions of an image, padding on either side, the MTP head."""
    arrays: Arrays = {}

    def run(group: str, tokens: np.ndarray, **inputs: np.ndarray) -> torch.Tensor:
        with torch.no_grad():
            output = model(
                input_ids=torch.from_numpy(tokens),
                **{name: torch.from_numpy(value) for name, value in inputs.items()},
                use_cache=False,
            )
        arrays[f"{group}/tokens"], arrays[f"{group}/logits"] = tokens, numpy(output.logits)
        arrays.update({f"{group}/{name}": value for name, value in inputs.items()})
        return output.logits

    run("text", draw.integers(0, VOCAB, (2, 70)))
    run("image_positions", draw.integers(0, VOCAB, (2, 23)), position_ids=image_positions(2, 23))
    for group, hidden in (("left_padding", slice(0, 7)), ("right_padding", slice(12, None))):
        mask = np.ones((2, 19), np.int64)
        mask[1, hidden] = 0
        positions = np.maximum(np.cumsum(mask, -1) - 1, 0)
        run(group, draw.integers(0, VOCAB, (2, 19)), attention_mask=mask, position_ids=positions)

    tokens = torch.from_numpy(draw.integers(0, VOCAB, (1, 17)))
    with torch.no_grad():
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        # Token t+1 and the hidden value of token t predict token t+2.
        output = mtp.forward_layer(
            0,
            hidden[:, :-1],
            torch.arange(1, 17)[None],
            MtpCache(config=model.config.get_mtp_config()),
            input_ids=tokens[:, 1:],
        )
        logits = mtp._project_to_logits(output)
    arrays["mtp/tokens"], arrays["mtp/main_hidden"] = numpy(tokens), numpy(hidden)
    arrays["mtp/hidden"], arrays["mtp/logits"] = numpy(output), numpy(logits)
    return arrays


def cached(model: Any, draw: np.random.Generator) -> Arrays:
    """Prefill, three single steps and a chunk of five behind its cache; a prompt shorter than the convolution."""
    arrays: Arrays = {}
    kinds = model.config.layer_types

    def run(group: str, tokens: np.ndarray, cache: Any, *, keep_cache: bool) -> None:
        with torch.no_grad():
            output = model(input_ids=torch.from_numpy(tokens), cache=cache, use_cache=True)
        arrays[f"{group}/tokens"], arrays[f"{group}/logits"] = tokens, numpy(output.logits[:, -1])
        if keep_cache:
            arrays.update(cache_arrays(group, cache, kinds))

    cache = new_cache(model)
    run("prefill", draw.integers(0, VOCAB, (2, 26)), cache, keep_cache=True)
    for step in range(3):
        run(f"step{step}", draw.integers(0, VOCAB, (2, 1)), cache, keep_cache=False)
    run("chunk", draw.integers(0, VOCAB, (2, 5)), cache, keep_cache=True)
    cache = new_cache(model)
    run("short", draw.integers(0, VOCAB, (1, 2)), cache, keep_cache=True)
    run("short_step", draw.integers(0, VOCAB, (1, 1)), cache, keep_cache=False)
    return arrays


def gradients(model: Any, draw: np.random.Generator) -> Arrays:
    """The mean cross entropy over the labelled tokens, and its gradient."""
    tokens = draw.integers(0, VOCAB, (2, 33))
    labels = tokens.copy()
    labels[0, :9] = -100
    labels[1, 25:] = -100
    model.zero_grad()
    loss = model(input_ids=torch.from_numpy(tokens), labels=torch.from_numpy(labels), use_cache=False).loss
    loss.backward()
    arrays = {"loss/tokens": tokens, "loss/labels": labels, "loss/loss": numpy(loss).reshape(1)}
    for name, parameter in model.named_parameters():
        arrays[f"gradient/{name}"] = numpy(parameter.grad)
    model.zero_grad()
    return arrays


def nodes(model: Any, draw: np.random.Generator) -> Arrays:
    """Every node of layer 0 (Gated DeltaNet) and layer 3 (attention), for nine tokens behind five."""
    cache = new_cache(model)
    record_call(model, draw.integers(0, VOCAB, (2, 5)), cache)
    record = record_call(model, draw.integers(0, VOCAB, (2, 9)), cache)
    arrays = {f"layer{i}/{name}": value for i in (0, 3) for name, value in record.layers[i].items()}
    for name in ("tokens", "embed", "final_norm_in", "final_norm", "logits"):
        arrays[f"outside/{name}"] = getattr(record, name)
    return arrays


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "tests" / "golden")
    out: Path = parser.parse_args().out
    torch.set_num_threads(1)  # one order of summation, the same bytes each time
    with float64_arithmetic():
        model = random_reference(CONFIG, seed=20)
        weights = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
        files = {
            "cache": cached(model, np.random.default_rng(1)),
            "gradients": gradients(model, np.random.default_rng(2)),
            "nodes": nodes(model, np.random.default_rng(3)),
        }
        config = model.config.to_dict()
        mtp, mtp_weights = random_mtp(model, seed=21)
        files["forward"] = forward(model, mtp, np.random.default_rng(4))
    weights |= {name: value.to(torch.bfloat16) for name, value in mtp_weights.items()}

    (out / "model").mkdir(parents=True, exist_ok=True)
    config |= {"architectures": ["Qwen3_5ForCausalLM"], "dtype": "bfloat16", "mtp_num_hidden_layers": 1}
    config.pop("_name_or_path", None)
    (out / "model" / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    weights = {name: value.contiguous() for name, value in weights.items()}
    save_torch(weights, out / "model" / "model.safetensors", metadata={"format": "pt"})
    for name, arrays in files.items():
        arrays = {key: np.ascontiguousarray(value) for key, value in sorted(arrays.items())}
        save_numpy(arrays, out / f"{name}.safetensors")
    for path in sorted(out.rglob("*.*")):
        print(f"{path.stat().st_size:>9,}  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
