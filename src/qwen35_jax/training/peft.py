"""LoRA adapters in the files of Hugging Face's PEFT: `adapter_config.json` and `adapter_model.safetensors`.

A file holds, for each linear map, `lora_A.weight` [rank, in] and `lora_B.weight` [out, rank]. The rows of the latter
are cut into our parameters as those of the map itself: `in_proj_qkv` one part after the other, `q_proj` head by head.

Format: `LoraConfig` and `get_peft_model_state_dict` of the PEFT library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from qwen35_jax.checkpoint.parameter_tree import dotted, leaf, parameter_leaves, set_leaf
from qwen35_jax.checkpoint.progress import Progress, quiet
from qwen35_jax.checkpoint.safetensors_file import (
    PARAMETER_DTYPES,
    StoredTensor,
    TensorToWrite,
    make_header,
    open_safetensors,
    write_safetensors,
)
from qwen35_jax.checkpoint.staging import staged_folder
from qwen35_jax.checkpoint.tensor_table import BoundPart, BoundTensor
from qwen35_jax.config import ModelConfig
from qwen35_jax.config.json_file import load_json
from qwen35_jax.errors import CheckpointError
from qwen35_jax.spec.tensor_rules import SPELLINGS, Spelling, default_spelling
from qwen35_jax.training.lora import (
    LINEAR_MAPS,
    Adapter,
    LoRA,
    adapted_tensors,
    change_shapes,
    init_adapter,
    map_name,
    map_path,
)

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_WRAPPED = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"

# Fields that change what the tensors mean, or which there are. Each is off in a plain LoRA.
_OFF = (
    "use_dora",
    "use_rslora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
# Other ways of drawing the first values also change the weights of the model.
_PLAIN_FIRST_VALUES = (True, False, "gaussian", "orthogonal", "eva")


class ReadAdapter(NamedTuple):
    """An adapter from a file, in the file's dtype, and its settings."""

    adapter: Adapter
    settings: LoRA


def write_peft(
    folder: str | Path,
    adapter: Adapter,
    settings: LoRA,
    config: ModelConfig,
    *,
    base_model: str | None = None,
    spelling: Spelling | None = None,
    progress: Progress = quiet,
) -> None:
    """Writes an adapter as a folder that PEFT, `transformers` and vLLM load.

    Args:
        folder: to be made; it appears complete or not at all.
        adapter: see `init_adapter`. Values are written as they are, in their own dtype.
        settings: those that it was made with.
        config: of the model.
        base_model: folder or hub name of the model that it belongs to, noted in the file.
        spelling: of the names of the class that will load it; by default that of the class for `config`.
        progress: shows how far the writing is.

    Raises:
        CheckpointError: an adapter that is not one of this model and these settings, a destination in use, a full disk.
        ConfigError: a target that the model has not.
    """
    _check_adapter(adapter, settings, config)
    tensors: list[TensorToWrite] = []
    bound = adapted_tensors(config, settings, spelling or default_spelling(config))
    for tensor in bound:
        change, name = leaf(adapter, map_path(tensor)), _WRAPPED + tensor.name.removesuffix(".weight")
        for suffix, shape, values, array in (
            (_A, (settings.rank, tensor.shape[1]), _a_of_file, change["a"]),
            (_B, (tensor.shape[0], settings.rank), _b_of_file, next(iter(change["b"].values()))),
        ):
            tensors.append(
                TensorToWrite(
                    name + suffix,
                    np.dtype(array.dtype),
                    shape,
                    lambda tensor=tensor, change=change, values=values: values(tensor, change),
                )
            )
    names = {map_name(tensor) for tensor in bound}
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": settings.rank,
        "lora_alpha": int(settings.alpha) if float(settings.alpha).is_integer() else settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": [name for name in LINEAR_MAPS if name in names],
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    nbytes = sum(tensor.nbytes for tensor in tensors)
    with (
        staged_folder(Path(folder), nbytes=nbytes) as staged,
        progress(f"Writing {Path(folder).name}", nbytes) as advance,
    ):
        (staged / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        header = make_header(tensors, {"format": "pt"})
        write_safetensors(staged / WEIGHTS_FILE, tensors, header, advance=advance)


def read_peft(folder: str | Path, config: ModelConfig) -> ReadAdapter:
    """Reads an adapter that PEFT or `write_peft` wrote.

    Args:
        folder: with both files.
        config: of the model that it belongs to.

    Raises:
        CheckpointError: a file that is missing or malformed, an adapter that is no plain LoRA, a tensor that is
            missing, of another shape than the rank and the model ask for, or that nothing of the model would use.
    """
    path = Path(folder) / WEIGHTS_FILE
    fields = _checked_fields(Path(folder) / CONFIG_FILE)
    stored = open_safetensors(path).tensors
    spelling = _spelling(path, stored)
    found = {name.removesuffix(_A).removesuffix(_B).rpartition(".")[2] for name in stored}
    settings = LoRA(
        rank=fields["r"],
        alpha=fields["lora_alpha"],
        dropout=fields["lora_dropout"],
        targets=tuple(name for name in LINEAR_MAPS if name in found),
    )
    bound = adapted_tensors(config, settings, spelling)
    _check_targets(Path(folder) / CONFIG_FILE, fields.get("target_modules"), found)
    _check_tensors(path, stored, bound, settings.rank)
    adapter: Adapter = {}
    dtype = next(iter(stored.values())).dtype
    for tensor in bound:
        if tensor.repeat == 0:
            set_leaf(adapter, map_path(tensor), _empty(tensor, settings.rank, dtype))
        change, name = leaf(adapter, map_path(tensor)), _WRAPPED + tensor.name.removesuffix(".weight")
        a = change["a"][tensor.repeat]
        a[...] = stored[name + _A].read().reshape(a.shape)
        b = stored[name + _B].read()
        for part in tensor.parts:
            to = change["b"][part.path[-1]][tensor.repeat]
            to[...] = _rows(tensor, part, b).reshape(to.shape)
    return ReadAdapter(adapter, settings)


def _a_of_file(tensor: BoundTensor, change: Mapping[str, Any]) -> np.ndarray:
    a = np.asarray(change["a"][tensor.repeat])
    return a.reshape(len(a), -1)


def _b_of_file(tensor: BoundTensor, change: Mapping[str, Any]) -> np.ndarray:
    parts = {name: np.asarray(array[tensor.repeat]) for name, array in change["b"].items()}
    one = next(iter(parts.values()))
    b = np.empty((tensor.shape[0], one.shape[-1]), one.dtype)
    for part in tensor.parts:
        rows = _rows(tensor, part, b)
        rows[...] = parts[part.path[-1]].reshape(rows.shape)
    return b


def _rows(tensor: BoundTensor, part: BoundPart, matrix: np.ndarray) -> np.ndarray:
    """The rows of [out, rank] that belong to a part: a view, to read from and write to."""
    if tensor.grouped:
        return matrix.reshape(part.groups, -1, matrix.shape[-1])[:, part.start : part.stop]
    return matrix[part.start : part.stop]


def _empty(tensor: BoundTensor, rank: int, dtype: np.dtype) -> dict[str, Any]:
    a_shape, b_shapes = change_shapes(tensor, rank)
    return {
        "a": np.empty(a_shape, dtype),
        "b": {name: np.empty(shape, dtype) for name, shape in b_shapes.items()},
    }


def _check_adapter(adapter: Adapter, settings: LoRA, config: ModelConfig) -> None:
    shapes = jax.eval_shape(lambda: init_adapter(config, settings, key=jax.random.key(0)))
    expected = {path: tuple(array.shape) for path, array in parameter_leaves(shapes)}
    found = {path: tuple(array.shape) for path, array in parameter_leaves(adapter)}
    for path in expected.keys() | found.keys():
        if expected.get(path) != found.get(path):
            raise CheckpointError(
                f"adapter, '{dotted(path)}': found shape {found.get(path)}, but the settings and the model ask for"
                f" {expected.get(path)} (None: no such array); write it with the settings that it was made with"
            )


def _checked_fields(path: Path) -> dict[str, Any]:
    fields: dict[str, Any] = dict(load_json(path))
    fields.setdefault("lora_dropout", 0.0)

    def refuse(name: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{path}: {name} is {fields.get(name)!r}, expected {expected}")

    if fields.get("peft_type") != "LORA":
        raise refuse("peft_type", "'LORA': other adapters cannot be read")
    for name in ("r", "lora_alpha", "lora_dropout"):
        value = fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int if name == "r" else (int, float)):
            raise refuse(name, "a whole number" if name == "r" else "a number")
    if fields.get("bias", "none") != "none":
        raise refuse("bias", "'none': biases are not adapted")
    for name in _OFF:
        if fields.get(name):
            raise refuse(name, "none: only plain LoRA adapters can be read")
    if fields.get("init_lora_weights", True) not in _PLAIN_FIRST_VALUES:
        raise refuse("init_lora_weights", "true: this one also changes the model's own weights")
    return fields


def _spelling(path: Path, stored: Mapping[str, StoredTensor]) -> Spelling:
    for spelling in SPELLINGS:
        if any(name.startswith(f"{_WRAPPED}{spelling.text}layers.") for name in stored):
            return spelling
    found = f"the first is '{next(iter(stored))}'" if stored else "there are none"
    known = ", ".join(f"'{_WRAPPED}{spelling.text}layers.'" for spelling in SPELLINGS)
    raise CheckpointError(
        f"{path}: no tensor belongs to a layer of this family ({found}); expected names that begin with one of {known}"
    )


def _check_targets(path: Path, targets: object, found: set[str]) -> None:
    if isinstance(targets, list):
        for target in map(str, targets):
            if target.rpartition(".")[2] not in found:
                raise CheckpointError(
                    f"{path}: target_modules names '{target}', but no tensor of {WEIGHTS_FILE} belongs to it;"
                    " the adapter is incomplete"
                )


def _check_tensors(
    path: Path, stored: Mapping[str, StoredTensor], bound: list[BoundTensor], rank: int
) -> None:
    expected: dict[str, tuple[int, int]] = {}
    for tensor in bound:
        name = _WRAPPED + tensor.name.removesuffix(".weight")
        expected[name + _A] = (rank, tensor.shape[1])
        expected[name + _B] = (tensor.shape[0], rank)
    for name in stored:
        if name not in expected:
            raise CheckpointError(
                f"{path}: tensor '{name}' belongs to nothing that can be adapted in this model; expected lora_A and"
                f" lora_B of {', '.join(LINEAR_MAPS)} in its layers"
            )
    dtype = next(iter(stored.values())).dtype
    for name, shape in expected.items():
        if name not in stored:
            raise CheckpointError(
                f"{path}: tensor '{name}' is missing; expected it, as the same map is adapted in another layer"
                " or its other half is there"
            )
        tensor = stored[name]
        if tensor.shape != shape:
            raise CheckpointError(
                f"{path}: tensor '{name}' has shape {list(tensor.shape)}, but rank {rank} of {CONFIG_FILE} and the"
                f" model ask for {list(shape)}"
            )
        if tensor.dtype != dtype or dtype not in PARAMETER_DTYPES:
            raise CheckpointError(
                f"{path}: tensor '{name}' is {tensor.dtype}, expected float16, bfloat16, float32 or float64, and the"
                f" same as the first tensor's, {dtype}"
            )
