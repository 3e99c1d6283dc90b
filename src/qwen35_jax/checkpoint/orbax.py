"""Checkpoints in Orbax format: what training writes and what loads straight onto a mesh.

A folder holds `params/` (an Orbax checkpoint of the nested parameter dictionary, readable with Orbax alone),
`config.json` and the files beside the weights. One that came from a Hugging Face checkpoint also holds
`kept.safetensors`, the tensors that no parameter was made from, and `source_layout.json`, with which an
export writes the source's files again.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.typing import DTypeLike

from qwen35_jax.checkpoint.companions import LAYOUT_FILE, copy_companions
from qwen35_jax.checkpoint.export import check_parameters, config_text, without_mtp
from qwen35_jax.checkpoint.hf import KeptTensors, SourceLayout, check_bound, open_hf
from qwen35_jax.checkpoint.index import check_shard_name
from qwen35_jax.checkpoint.orbax_handlers import HostArrays, PlacedArrays
from qwen35_jax.checkpoint.parameter_tree import (
    LazyParameter,
    ParameterPath,
    dotted,
    leaf,
    parameter_leaves,
    set_leaf,
)
from qwen35_jax.checkpoint.placement import check_shardings
from qwen35_jax.checkpoint.progress import Advance, Progress, quiet
from qwen35_jax.checkpoint.regrouping import regroup, with_unrolled_layers
from qwen35_jax.checkpoint.safetensors_file import (
    PARAMETER_DTYPES,
    TensorToWrite,
    make_header,
    open_safetensors,
    parse_header,
    write_safetensors,
)
from qwen35_jax.checkpoint.staging import staged_folder
from qwen35_jax.checkpoint.streaming import dtype_in_memory, lazy_parameters, read_parameters
from qwen35_jax.checkpoint.tensor_table import bound_tensors, parameter_shapes
from qwen35_jax.config import ModelConfig, require_dense_text
from qwen35_jax.config.json_file import parse_json, read_json_text
from qwen35_jax.errors import CheckpointError, Qwen35Error
from qwen35_jax.spec.tensor_rules import default_spelling

PARAMETERS = "params"
KEPT_FILE = "kept.safetensors"


def convert_to_orbax(
    source: str | Path, destination: str | Path, *, progress: Progress = quiet
) -> ModelConfig:
    """Turn a folder in Hugging Face layout into an Orbax one, a parameter at a time.

    Raises:
        ConfigError, CheckpointError: as `load_hf` and `save_orbax`.
    """
    checkpoint = open_hf(source, mtp=False)
    save_orbax(
        lazy_parameters(checkpoint.bound, checkpoint.stored),
        checkpoint.config,
        destination,
        kept=checkpoint.kept,
        companions=source,
        progress=progress,
    )
    return checkpoint.config


def save_orbax(
    parameters: Mapping[str, Any],
    config: ModelConfig,
    destination: str | Path,
    *,
    kept: KeptTensors | None = None,
    companions: str | Path | None = None,
    progress: Progress = quiet,
) -> None:
    """Write parameters as a folder that `load_orbax` reads.

    Args:
        parameters: nested parameter dictionary of JAX arrays, NumPy arrays or `LazyParameter`s.
        config: of the model.
        destination: folder to be made; it appears complete or not at all.
        kept: from the import, to make a later export of the whole checkpoint possible.
        companions: folder whose small files are copied too, those that `COMPANIONS` names.
        progress: shows how far the writing is.

    Raises:
        CheckpointError: parameters that do not fit the config, a destination in use, or a full disk.
    """
    destination = Path(destination).absolute()
    check_parameters(parameters, config)
    if config.text.unroll_layers:
        stacked = with_unrolled_layers(config, False)
        parameters, config = regroup(parameters, config.text, stacked.text), stacked
    if "mtp" not in parameters and not (kept and any(name.startswith("mtp.") for name in kept.tensors)):
        config = without_mtp(config)
    beside = [
        TensorToWrite(tensor.name, tensor.dtype, tensor.shape, tensor.read)
        for tensor in ({} if kept is None else kept.tensors).values()
    ]
    nbytes = sum(array.nbytes for _, array in parameter_leaves(parameters)) + sum(t.nbytes for t in beside)
    with (
        staged_folder(destination, nbytes=nbytes) as folder,
        progress(f"Writing {destination.name}", nbytes) as advance,
    ):
        layout = None if kept is None else kept.layout
        (folder / "config.json").write_text(config_text(config, layout), encoding="utf-8")
        if companions is not None:
            copy_companions(Path(companions), folder)
        if layout is not None:
            described = {**dataclasses.asdict(layout), "kept": [tensor.name for tensor in beside]}
            (folder / LAYOUT_FILE).write_text(json.dumps(described), encoding="utf-8")
        if beside:
            write_safetensors(folder / KEPT_FILE, beside, make_header(beside, {}), advance=advance)
        _save_tree(folder / PARAMETERS, parameters, advance)


def _save_tree(directory: Path, parameters: Mapping[str, Any], advance: Advance) -> None:
    tree: dict[str, Any] = {}
    for path, array in parameter_leaves(parameters):
        if isinstance(array, jax.Array) and len(array.sharding.device_set) == 1:
            array = LazyParameter(array.shape, np.dtype(array.dtype), lambda array=array: np.asarray(array))
        elif isinstance(array, np.ndarray):
            array = LazyParameter(array.shape, array.dtype, lambda array=array: array)
        set_leaf(tree, path, array)
    registry = ocp.type_handlers.create_type_handler_registry(
        (LazyParameter, HostArrays(advance)), (jax.Array, ocp.type_handlers.ArrayHandler())
    )
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False)
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(directory, args=ocp.args.PyTreeSave(tree))
    except (ValueError, RuntimeError) as error:
        # Orbax and TensorStore tell of the system's errors in the text of their own. A reader's error passes as it is.
        if isinstance(error, Qwen35Error) or os.strerror(errno.ENOSPC) in str(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{directory.parent}: cannot be written: {reason}; nothing was written"
        ) from error


def load_orbax(
    folder: str | Path,
    *,
    parameter_dtype: DTypeLike | None = None,
    mtp: bool = False,
    unroll_layers: bool = False,
    shardings: Any = None,
    to_device: bool = True,
    progress: Progress = quiet,
) -> tuple[ModelConfig, dict[str, Any], KeptTensors | None]:
    """Load the text model of a folder that `save_orbax` wrote.

    Arguments, results and errors are those of `load_hf`; the third result is None where nothing was kept.
    """
    folder = Path(folder).absolute()
    config = ModelConfig.from_hf(folder)
    require_dense_text(config)
    kept = _read_kept(folder)
    kept_mtp = kept is not None and any(name.startswith("mtp.") for name in kept.tensors)
    directory = folder / PARAMETERS
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        stored = _stored_parameters(checkpointer, directory)
    saved_mtp = any(path[0] == "mtp" for path in stored)
    if mtp and not saved_mtp and not kept_mtp:
        raise CheckpointError(f"{folder}: the MTP head was asked for, but the checkpoint holds none")
    wanted = _wanted_parameters(config, stored, folder, mtp=mtp and saved_mtp)
    unrolled = with_unrolled_layers(config, unroll_layers)
    check_shardings(shardings, parameter_shapes(unrolled, mtp=mtp), to_device=to_device)
    target: dict[str, Any] = {}
    for path, shape in wanted.items():
        dtype = dtype_in_memory(path, stored[_as_text(path)][1], parameter_dtype)
        if to_device:
            dtype = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
        sharding = None if shardings is None or unroll_layers else leaf(shardings, path)
        set_leaf(target, path, jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))
    parameters = _restore_tree(
        directory, target, to_device=to_device and not unroll_layers, progress=progress
    )
    if unroll_layers:
        parameters = _unstack(parameters, config, unrolled, shardings=shardings, to_device=to_device)
        config = unrolled
    if mtp and not saved_mtp and kept is not None:
        parameters["mtp"], kept = _read_kept_mtp(config, kept, parameter_dtype, shardings, to_device)
    return config, parameters, kept


def _restore_tree(
    directory: Path, target: dict[str, Any], *, to_device: bool, progress: Progress
) -> dict[str, Any]:
    """Read what `target` names; Orbax places each device's part where there are shardings."""
    nbytes = sum(math.prod(each.shape) * each.dtype.itemsize for _, each in parameter_leaves(target))
    with progress(f"Loading {directory.parent.name}", nbytes) as advance:
        registry = ocp.type_handlers.create_type_handler_registry(
            (np.ndarray, HostArrays(advance, to_device=to_device)), (jax.Array, PlacedArrays(advance))
        )
        handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
        arguments = ocp.args.PyTreeRestore(
            target,
            restore_args=ocp.checkpoint_utils.construct_restore_args(target),
            partial_restore=True,
        )
        try:
            with ocp.Checkpointer(handler) as checkpointer:
                return checkpointer.restore(directory, args=arguments)
        except (ValueError, OSError) as error:  # TensorStore tells damaged files by a ValueError
            raise CheckpointError(
                f"{directory}: cannot be restored; a file is missing or damaged: {error}"
            ) from error


def _unstack(
    parameters: dict[str, Any], config: ModelConfig, unrolled: ModelConfig, *, shardings: Any, to_device: bool
) -> dict[str, Any]:
    """Host arrays, stacked, to arrays per layer."""
    result: dict[str, Any] = {}
    for path, value in parameter_leaves(regroup(parameters, config.text, unrolled.text)):
        array = value.read() if isinstance(value, LazyParameter) else value
        if to_device:
            array = jax.device_put(array, None if shardings is None else leaf(shardings, path))
        set_leaf(result, path, array)
    return result


def _stored_parameters(
    checkpointer: ocp.Checkpointer, directory: Path
) -> dict[tuple[str, ...], tuple[tuple[int, ...], np.dtype]]:
    """Shape and data type of everything in the Orbax checkpoint; Orbax gives all keys as text."""
    try:
        metadata: Any = checkpointer.metadata(directory).item_metadata
        return {
            _as_text(path): (tuple(array.shape), np.dtype(array.dtype))
            for path, array in parameter_leaves(metadata.tree)
        }
    except (ValueError, OSError, AttributeError, TypeError, KeyError) as error:
        raise CheckpointError(f"{directory}: is not a complete Orbax checkpoint ({error})") from error


def _wanted_parameters(
    config: ModelConfig,
    stored: Mapping[tuple[str, ...], tuple[tuple[int, ...], np.dtype]],
    folder: Path,
    *,
    mtp: bool,
) -> dict[ParameterPath, tuple[int, ...]]:
    """Paths and shapes of the parameters to load, all of which the checkpoint holds, and no others."""
    wanted = parameter_shapes(config, mtp=mtp)
    for path, shape in wanted.items():
        found = stored.get(_as_text(path))
        if found is None:
            raise CheckpointError(f"{folder}: parameter '{dotted(path)}' is missing from the checkpoint")
        if found[0] != shape:
            raise CheckpointError(
                f"{folder}: parameter '{dotted(path)}' has shape {list(found[0])},"
                f" but config.json asks for {list(shape)}"
            )
        if found[1] not in PARAMETER_DTYPES:
            raise CheckpointError(
                f"{folder}: parameter '{dotted(path)}' is {found[1]}, expected float16, bfloat16, float32 or float64"
            )
    known = {_as_text(path) for path in wanted}
    for path in stored:
        if path not in known and path[0] != "mtp":
            raise CheckpointError(
                f"{folder}: parameter '{dotted(path)}' belongs to no part of the model"
                " that config.json describes"
            )
    return wanted


def _as_text(path: ParameterPath) -> tuple[str, ...]:
    return tuple(map(str, path))


def _read_kept(folder: Path) -> KeptTensors | None:
    layout_file, kept_file = folder / LAYOUT_FILE, folder / KEPT_FILE
    if not layout_file.exists():
        if kept_file.exists():
            raise CheckpointError(
                f"{folder}: has {KEPT_FILE} without {LAYOUT_FILE}; convert the source again"
            )
        return None
    try:
        layout, names = _parse_layout(read_json_text(layout_file), layout_file)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{layout_file}: is damaged ({error}); convert the source again") from error
    tensors = open_safetensors(kept_file).tensors if names else {}
    if names != tensors.keys():
        (name, *_) = sorted(names ^ tensors.keys())
        raise CheckpointError(f"{kept_file}: does not agree with {LAYOUT_FILE} about tensor '{name}'")
    return KeptTensors(layout, tensors)


def _parse_layout(text: str, where: Path) -> tuple[SourceLayout, set[str]]:
    """What `save_orbax` wrote down about the source, and the names of the kept tensors.

    An export writes files under the names given here, and the folder may come from anyone.

    Raises:
        ValueError, CheckpointError: what is wrong with it.
    """
    data = parse_json(text)
    fields = (
        [data.get(name) for name in ("config", "headers", "index", "kept")] if isinstance(data, dict) else []
    )
    if not fields:
        raise ValueError("it is no object with the fields that it should have")
    config, headers, index, kept = fields
    if not isinstance(config, str) or not isinstance(index, str | None):
        raise ValueError("config or index is no text")
    if (
        not isinstance(headers, dict)
        or not headers
        or not all(isinstance(each, str) for each in headers.values())
    ):
        raise ValueError("headers are no texts")
    if not isinstance(kept, list) or not all(isinstance(name, str) for name in kept):
        raise ValueError("kept is no list of names")
    parse_json(config)
    for file, header in headers.items():
        check_shard_name(file, listed_in=where)
        parse_header(where, header, data_start=0)
    return SourceLayout(config, headers, index), set(kept)


def _read_kept_mtp(
    config: ModelConfig,
    kept: KeptTensors,
    parameter_dtype: DTypeLike | None,
    shardings: Any,
    to_device: bool,
) -> tuple[dict[str, Any], KeptTensors]:
    """The MTP head's parameters out of the kept tensors, and what then remains of these."""
    everything = bound_tensors(config, default_spelling(config), mtp=True, lm_head=False)
    bound = [tensor for tensor in everything if tensor.name.startswith("mtp.")]
    check_bound(bound, kept.tensors, where=KEPT_FILE)
    parameters = read_parameters(
        bound,
        kept.tensors,
        parameter_dtype=parameter_dtype,
        shardings=None if shardings is None else {"mtp": shardings["mtp"]},
        to_device=to_device,
        advance=lambda count: None,
    )
    used = {tensor.name for tensor in bound}
    rest = {name: tensor for name, tensor in kept.tensors.items() if name not in used}
    return parameters["mtp"], dataclasses.replace(kept, tensors=rest)


def holds_mtp(folder: Path) -> bool:
    """Whether the MTP head is among the saved parameters."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        stored = _stored_parameters(checkpointer, folder.absolute() / PARAMETERS)
    return any(path[0] == "mtp" for path in stored)
