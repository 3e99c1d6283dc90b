"""Writing a checkpoint in Hugging Face layout."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from qwen35_jax.checkpoint.companions import copy_companions
from qwen35_jax.checkpoint.hf import KeptTensors, SourceLayout, spelling_of
from qwen35_jax.checkpoint.index import INDEX_FILE, SINGLE_FILE
from qwen35_jax.checkpoint.parameter_tree import dotted, leaf, parameter_leaves
from qwen35_jax.checkpoint.progress import Progress, quiet
from qwen35_jax.checkpoint.safetensors_file import (
    PARAMETER_DTYPES,
    StoredTensor,
    TensorToWrite,
    make_header,
    parse_header,
    write_safetensors,
)
from qwen35_jax.checkpoint.staging import staged_folder
from qwen35_jax.checkpoint.tensor_table import BoundTensor, bound_tensors, parameter_shapes
from qwen35_jax.config import ModelConfig
from qwen35_jax.errors import CheckpointError
from qwen35_jax.spec.tensor_rules import default_spelling

DEFAULT_MAX_SHARD_BYTES = 5_000_000_000


@dataclasses.dataclass(frozen=True)
class _ShardPlan:
    """A weight file to be written. `header` is None where a new one has to be made."""

    file: str
    tensors: list[TensorToWrite]
    metadata: Mapping[str, str]
    header: str | None = None


def export_hf(
    parameters: Mapping[str, Any],
    config: ModelConfig,
    destination: str | Path,
    *,
    kept: KeptTensors | None = None,
    companions: str | Path | None = None,
    max_shard_bytes: int | None = None,
    progress: Progress = quiet,
) -> None:
    """Write parameters as a folder that Hugging Face (and `load_hf`) reads.

    With `kept` from the import and the same tensors to write, the weight files, their index and `config.json` are
    those of the source again: names, shapes, data types, shards and headers, byte for byte where values have not
    changed. Parameters are cast back to the data type that the source stored.

    Of several processes all have to call this, with the same arguments: they bring every tensor together, one after the
    other, and the first one writes. It returns when the folder is complete.

    Args:
        parameters: nested parameter dictionary, NumPy or JAX arrays.
        config: of the model. An MTP head that is neither in `parameters` nor kept is taken out of `config.json`.
        destination: folder to be made; it appears complete or not at all.
        kept: what the import did not use, and the source's layout. Without it, names are those of the Hugging
            Face class for `config`, and data types those of the parameters.
        companions: folder whose small files are copied too, those that `COMPANIONS` names. Any other file of it
            (code, pictures, weights in other formats, subfolders) stays behind.
        max_shard_bytes: cut the weights anew into files of at most this many bytes (a larger tensor gets its
            own file).
        progress: shows how far the writing is.

    Raises:
        CheckpointError: parameters that do not fit the config, a destination in use, or a full disk.
    """
    destination = Path(destination)
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes: found {max_shard_bytes}, expected a number of bytes")
    check_parameters(parameters, config)
    layout = None if kept is None else kept.layout
    known = {} if layout is None else _layout_tensors(layout)
    ours = _tensors_of_parameters(parameters, config, known)
    to_write = ours | _tensors_kept(kept, ours)
    if layout is not None and max_shard_bytes is None and _same_tensors(to_write, known):
        shards, index = _source_shards(layout, to_write), layout.index
    else:
        metadata = {"format": "pt"} if layout is None else _layout_metadata(layout)
        shards = _new_shards(to_write, metadata, max_shard_bytes or DEFAULT_MAX_SHARD_BYTES)
        index = _new_index(shards)
    if not any(name.startswith("mtp.") for name in to_write):
        config = without_mtp(config)
    # Asked first, since to ask which process this is starts JAX's devices, which an export from files never needs.
    several = jax.distributed.is_initialized()
    if several and jax.process_index() > 0:
        for name in (tensor.name for shard in shards for tensor in shard.tensors):
            if name in ours:
                ours[name].values()
    else:
        _write(destination, config_text(config, layout), shards, index, companions, progress)
    if several:
        multihost_utils.sync_global_devices(f"written: {destination.name}")


def _write(
    destination: Path,
    config: str,
    shards: list[_ShardPlan],
    index: str | None,
    companions: str | Path | None,
    progress: Progress,
) -> None:
    nbytes = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    with (
        staged_folder(destination, nbytes=nbytes) as folder,
        progress(f"Writing {destination.name}", nbytes) as advance,
    ):
        (folder / "config.json").write_text(config, encoding="utf-8")
        if companions is not None:
            copy_companions(Path(companions), folder)
        for shard in shards:
            path = folder / shard.file
            path.parent.mkdir(parents=True, exist_ok=True)
            header = shard.header or make_header(shard.tensors, shard.metadata)
            write_safetensors(path, shard.tensors, header, advance=advance)
        if index is not None:
            (folder / INDEX_FILE).write_text(index, encoding="utf-8")


def check_parameters(parameters: Mapping[str, Any], config: ModelConfig) -> None:
    """Raises `CheckpointError` for a parameter that the config asks for otherwise or not at all, or no real numbers."""
    expected = parameter_shapes(config, mtp="mtp" in parameters)
    found = {path: tuple(array.shape) for path, array in parameter_leaves(parameters)}
    for path in expected.keys() | found.keys():
        if expected.get(path) != found.get(path):
            raise CheckpointError(
                f"parameter '{dotted(path)}': found shape {found.get(path)}, but the config asks for"
                f" {expected.get(path)} (None: no such parameter); export the config of these parameters"
            )
    for path, array in parameter_leaves(parameters):
        if np.dtype(array.dtype) not in PARAMETER_DTYPES:
            raise CheckpointError(
                f"parameter '{dotted(path)}': found {array.dtype}, expected float16, bfloat16, float32 or float64"
            )


def _layout_tensors(layout: SourceLayout) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file, header in layout.headers.items():
        for tensor in parse_header(Path(file), header, data_start=0)[0]:
            tensors[tensor.name] = tensor
    return tensors


def _layout_metadata(layout: SourceLayout) -> dict[str, str]:
    file, header = next(iter(layout.headers.items()))
    return parse_header(Path(file), header, data_start=0)[1]


def _tensors_of_parameters(
    parameters: Mapping[str, Any], config: ModelConfig, known: Mapping[str, StoredTensor]
) -> dict[str, TensorToWrite]:
    spelling = spelling_of(known, config, where="the source") if known else default_spelling(config)
    head = f"{spelling.head}lm_head.weight" in known
    bound = bound_tensors(config, spelling, mtp="mtp" in parameters, lm_head=head)
    result = {}
    for tensor in bound:
        values = leaf(parameters, tensor.parts[0].path)
        dtype = known[tensor.name].dtype if tensor.name in known else np.dtype(values.dtype)
        if dtype not in PARAMETER_DTYPES:
            raise CheckpointError(
                f"tensor '{tensor.name}': the source's layout says {dtype}, which would destroy the parameter's"
                " values; the layout is damaged, export without it"
            )
        result[tensor.name] = TensorToWrite(
            tensor.name,
            dtype,
            tensor.shape,
            lambda tensor=tensor, dtype=dtype: _assemble(tensor, parameters, dtype),
        )
    return result


def _tensors_kept(kept: KeptTensors | None, ours: Mapping[str, TensorToWrite]) -> dict[str, TensorToWrite]:
    return {
        name: TensorToWrite(name, tensor.dtype, tensor.shape, tensor.read)
        for name, tensor in ({} if kept is None else kept.tensors).items()
        if name not in ours
    }


def _assemble(tensor: BoundTensor, parameters: Mapping[str, Any], dtype: np.dtype) -> np.ndarray:
    """One tensor of the file, from the parameters that its rows hold."""
    rows = np.empty(tensor.shape, dtype)
    for part in tensor.parts:
        values = _on_host(leaf(parameters, part.path), tensor.repeat)
        np.copyto(tensor.part_view(rows, part), values, casting="unsafe")
    return rows


def _on_host(array: jax.Array | np.ndarray, repeat: int | None) -> np.ndarray:
    """A parameter, or one repeat of a stacked one, without bringing the whole stack over from a device."""
    if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        part = array if repeat is None else jax.lax.dynamic_index_in_dim(array, repeat, keepdims=False)
        return multihost_utils.process_allgather(part, tiled=True)
    if repeat is None:
        return np.asarray(array)
    if isinstance(array, jax.Array):
        (device, *others) = array.devices()
        if others or device.platform != "cpu":
            return np.asarray(jax.lax.dynamic_index_in_dim(array, repeat, keepdims=False))
    return np.asarray(array)[repeat]


def _same_tensors(to_write: Mapping[str, TensorToWrite], known: Mapping[str, StoredTensor]) -> bool:
    return {name: tensor.shape for name, tensor in to_write.items()} == {
        name: tensor.shape for name, tensor in known.items()
    }


def _source_shards(layout: SourceLayout, to_write: Mapping[str, TensorToWrite]) -> list[_ShardPlan]:
    shards = []
    for file, header in layout.headers.items():
        tensors, metadata = parse_header(Path(file), header, data_start=0)
        shards.append(_ShardPlan(file, [to_write[tensor.name] for tensor in tensors], metadata, header))
    return shards


def _new_shards(
    to_write: Mapping[str, TensorToWrite], metadata: Mapping[str, str], max_bytes: int
) -> list[_ShardPlan]:
    cuts: list[list[TensorToWrite]] = [[]]
    size = 0
    for tensor in to_write.values():
        if cuts[-1] and size + tensor.nbytes > max_bytes:
            cuts.append([])
            size = 0
        cuts[-1].append(tensor)
        size += tensor.nbytes
    if len(cuts) == 1:
        return [_ShardPlan(SINGLE_FILE, cuts[0], metadata)]
    return [
        _ShardPlan(f"model-{number:05d}-of-{len(cuts):05d}.safetensors", tensors, metadata)
        for number, tensors in enumerate(cuts, start=1)
    ]


def _new_index(shards: list[_ShardPlan]) -> str | None:
    if len(shards) == 1:
        return None
    weight_map = {tensor.name: shard.file for shard in shards for tensor in shard.tensors}
    total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2) + "\n"


def without_mtp(config: ModelConfig) -> ModelConfig:
    """The configuration of a checkpoint that holds no MTP head."""
    return dataclasses.replace(config, text=dataclasses.replace(config.text, mtp_num_hidden_layers=0))


def config_text(config: ModelConfig, layout: SourceLayout | None) -> str:
    """`config.json`: the source's own text as long as it still says the same."""
    data = config.to_hf()
    if layout is not None and json.loads(layout.config) == data:
        return layout.config
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
