"""From the name of a model to one that runs, and from one layout on disk to the other."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from qwen35_jax.checkpoint.export import export_hf
from qwen35_jax.checkpoint.hf import load_hf
from qwen35_jax.checkpoint.index import has_weights
from qwen35_jax.checkpoint.model_name import find_model
from qwen35_jax.checkpoint.progress import Progress, quiet
from qwen35_jax.checkpoint.staging import check_destination
from qwen35_jax.config import ModelConfig
from qwen35_jax.errors import CheckpointError
from qwen35_jax.model import Parameters, abstract_model
from qwen35_jax.nn.parameter import check_float_dtype


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        config: as its `config.json` says.
        graphdef: of the text model, with its compute dtype.
        parameters: nested dictionary of arrays.
        folder: local folder with the tokenizer, chat template and generation settings.
    """

    config: ModelConfig
    graphdef: nnx.GraphDef
    parameters: Parameters
    folder: Path


def load(
    source: str | Path,
    *,
    dtype: DTypeLike | Literal["auto"] = "auto",
    parameter_dtype: DTypeLike | Literal["auto"] | None = None,
    mtp: bool = False,
    unroll_layers: bool | None = None,
    shardings: Any = None,
    progress: Progress = quiet,
) -> LoadedModel:
    """Load a text model to run it.

    Args:
        source: see `find_model`.
        dtype: compute dtype. "auto" takes that of the parameters as loaded, on every backend: bfloat16 for a
            checkpoint in bfloat16 (and for one in float16, whose range is too small), float32 for all others.
        parameter_dtype: dtype to store parameters in; None or "auto" keeps the checkpoint's.
        mtp: with the multi-token-prediction head.
        unroll_layers: see `TextConfig.unroll_layers`; None unrolls where JAX runs on a CPU.
        shardings: nested dictionary like the parameters, of `jax.sharding.Sharding`; None uses one device.
        progress: shows how far the reading is.

    Raises:
        ConfigError, CheckpointError: the model cannot be found, or its files are not what they should be; or a dtype
            is none for this.
    """
    for name, asked in (("dtype", dtype), ("parameter_dtype", parameter_dtype)):
        if asked is not None and not _is_auto(asked):
            check_float_dtype(name, asked)
    folder = find_model(source)
    if _is_auto(parameter_dtype):
        parameter_dtype = None
    if unroll_layers is None:
        unroll_layers = jax.default_backend() == "cpu" and shardings is None
    config, parameters, _ = _load_folder(
        folder,
        parameter_dtype=parameter_dtype,
        mtp=mtp,
        unroll_layers=unroll_layers,
        shardings=shardings,
        progress=progress,
    )
    if _is_auto(dtype):
        dtype = _compute_dtype(parameters["embed_tokens"]["weight"].dtype)
    graphdef, _ = abstract_model(config, parameter_dtype=parameter_dtype or jnp.float32, dtype=dtype, mtp=mtp)
    return LoadedModel(config, graphdef, parameters, folder)


def _is_auto(dtype: Any) -> bool:
    return isinstance(dtype, str) and dtype == "auto"


def _compute_dtype(stored: np.dtype) -> np.dtype:
    """What a model computes in whose parameters are stored so: the two dtypes that it is tested in at speed."""
    return jnp.dtype(jnp.bfloat16 if jnp.finfo(stored).bits < 32 else jnp.float32)


def convert(source: str | Path, destination: str | Path, *, progress: Progress = quiet) -> ModelConfig:
    """Turn a model in Hugging Face layout into an Orbax folder; see `orbax.convert_to_orbax`."""
    from qwen35_jax.checkpoint.orbax import convert_to_orbax

    check_destination(Path(destination))
    folder = find_model(source)
    if is_orbax_folder(folder):
        raise CheckpointError(
            f"{folder}: is an Orbax folder already; `qwen35 export` writes Hugging Face layout"
        )
    return convert_to_orbax(folder, destination, progress=progress)


def export(
    source: str | Path,
    destination: str | Path,
    *,
    max_shard_bytes: int | None = None,
    progress: Progress = quiet,
) -> ModelConfig:
    """Write any model as a folder in Hugging Face layout, the tokenizer's files with it; see `export_hf`."""
    check_destination(Path(destination))
    folder = find_model(source)
    config, parameters, kept = _load_folder(
        folder, mtp=_mtp_among_parameters(folder), to_device=False, progress=progress
    )
    export_hf(
        parameters,
        config,
        destination,
        kept=kept,
        companions=folder,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
    )
    return config


def is_orbax_folder(folder: Path) -> bool:
    """Whether a folder has the layout of `save_orbax` and not that of Hugging Face."""
    return (folder / "params").is_dir() and not has_weights(folder)


def _load_folder(folder: Path, **options: Any) -> tuple[ModelConfig, Parameters, Any]:
    # Orbax takes a second to import, which a model in Hugging Face layout need not wait for.
    if is_orbax_folder(folder):
        from qwen35_jax.checkpoint.orbax import load_orbax

        return load_orbax(folder, **options)
    if not (folder / "config.json").exists() and not has_weights(folder):
        raise CheckpointError(
            f"{folder}: holds no model: expected config.json with model.safetensors (Hugging Face)"
            " or params/ (Orbax)"
        )
    return load_hf(folder, **options)


def _mtp_among_parameters(folder: Path) -> bool:
    """Whether an Orbax folder stores the MTP head as parameters, and not as kept tensors."""
    if not is_orbax_folder(folder):
        return False
    from qwen35_jax.checkpoint.orbax import holds_mtp

    return holds_mtp(folder)
