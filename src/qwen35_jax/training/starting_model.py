"""From the model that a run starts with to its first state, and from its last state to a model in files."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from qwen35_jax.checkpoint.export import export_hf
from qwen35_jax.checkpoint.hf import KeptTensors, load_hf
from qwen35_jax.checkpoint.progress import Progress
from qwen35_jax.checkpoint.source import is_orbax_folder
from qwen35_jax.model import Parameters
from qwen35_jax.training.lora import LoRA, init_adapter, merged
from qwen35_jax.training.peft import write_peft
from qwen35_jax.training.placement import place_train_state
from qwen35_jax.training.preparation import PreparedRun
from qwen35_jax.training.processes import is_first
from qwen35_jax.training.settings import TrainingSettings
from qwen35_jax.training.train_step import TrainState

MODEL, ADAPTER = "model", "adapter"

# Steps fold their numbers into the key of a run; no step has this one.
_ADAPTER_KEY = np.uint32(2**32 - 1)


class StartingModel(NamedTuple):
    """The model that a run starts with, as its steps need it.

    Attributes:
        parameters: of the model, where they are trained; None where an adapter is.
        frozen: of the model, where they stay; None where they are trained.
        kept: the tensors of its files that have no part in the training.
    """

    parameters: Parameters | None
    frozen: Parameters | None
    kept: KeptTensors | None


def load_starting_model(run: PreparedRun, settings: TrainingSettings, progress: Progress) -> StartingModel:
    """Reads the model of a run onto its devices: in float32 where it is trained, else in the dtypes of its files.

    Raises:
        CheckpointError: it cannot be read.
    """
    stays = run.part.frozen is not None
    options: dict[str, Any] = {
        "parameter_dtype": None if stays else "float32",
        "mtp": settings.objective.mtp_weight > 0,
        "shardings": run.part.frozen_shardings if stays else run.part.trained_shardings,
        "progress": progress,
    }
    if is_orbax_folder(run.folder):
        from qwen35_jax.checkpoint.orbax import load_orbax

        _, parameters, kept = load_orbax(run.folder, **options)
    else:
        _, parameters, kept = load_hf(run.folder, **options)
    return StartingModel(None, parameters, kept) if stays else StartingModel(parameters, None, kept)


def first_state(run: PreparedRun, settings: TrainingSettings, parameters: Parameters | None) -> TrainState:
    """The state before the first step.

    Args:
        run: of `prepare`.
        settings: of the run.
        parameters: of the model, where they are trained, and given away; None where an adapter is.
    """
    seed = settings.run.seed
    if parameters is not None:
        trained = parameters
    else:
        assert settings.lora is not None, "something is trained"
        make = functools.partial(init_adapter, run.config, settings.lora)
        key = jax.random.fold_in(jax.random.key(seed), _ADAPTER_KEY)
        trained = jax.jit(make, out_shardings=run.part.trained_shardings)(key=key)
    return place_train_state(trained, run.optimizer, run.abstract_state, seed=seed)


def export_trained(
    run: PreparedRun, trained: Parameters, start: StartingModel, output: Path, progress: Progress
) -> Path:
    """Writes what a run has made, leaving out what an earlier start has written: returns the folder of the model.

    It is in Hugging Face layout and in the dtypes of the files that the run started from. Where an adapter was trained,
    the model has it added in, and it is there by itself too, as PEFT has it.

    Raises:
        CheckpointError: a full disk, or a folder that cannot be written.
    """
    model, adapter, lora = output / MODEL, output / ADAPTER, run.part.parameters_of
    parameters = trained
    if isinstance(lora, LoRA):
        assert start.frozen is not None, "an adapter is trained beside parameters that stay"
        whole = jax.jit(lambda arrays: arrays, out_shardings=NamedSharding(run.mesh, PartitionSpec()))(
            trained
        )
        if is_first() and not adapter.exists():
            write_peft(adapter, whole, lora, run.config, base_model=str(run.folder), progress=progress)
        parameters = merged(start.frozen, trained, lora)
    if not model.exists():
        export_hf(parameters, run.config, model, kept=start.kept, companions=run.folder, progress=progress)
    return model
