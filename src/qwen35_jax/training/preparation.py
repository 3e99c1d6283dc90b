"""A run's settings made into what its steps need; what cannot work is refused here, before anything slow."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from qwen35_jax.checkpoint.model_name import find_model
from qwen35_jax.config import ModelConfig
from qwen35_jax.errors import ConfigError, PromptError
from qwen35_jax.inference.settings import GenerationSettings
from qwen35_jax.model import abstract_model
from qwen35_jax.sharding import parameter_axes
from qwen35_jax.training.batches import AnyBatch, Batches, Rows
from qwen35_jax.training.optimizers import make_optimizer
from qwen35_jax.training.packed_files import packed_file
from qwen35_jax.training.packing import PackedRows
from qwen35_jax.training.placement import (
    abstract_train_state,
    check_row_length,
    check_rows,
    held_rows,
    make_mesh,
)
from qwen35_jax.training.preference.rows import ReferencedRows, packed_pairs
from qwen35_jax.training.samples import encode_questions
from qwen35_jax.training.settings import TrainingSettings
from qwen35_jax.training.tensorboard import check_tensorboard
from qwen35_jax.training.train_step import TrainState
from qwen35_jax.training.trained_part import TrainedPart, trained_part
from qwen35_jax.training.watcher import Watcher


@dataclasses.dataclass(frozen=True)
class PreparedRun:
    """A run whose settings, files and mesh have been found good.

    Attributes:
        folder: of the model that it starts from.
        config: of the model.
        graphdef: of the model, with the dtype of the computation.
        mesh: of the devices.
        part: what is trained of the model.
        optimizer: of that part.
        abstract_state: shapes, dtypes and shardings of the state.
        train_rows: of the data.
        batches: of the steps, over these rows.
        evaluation_rows: that the loss is measured on at intervals, if any.
        questions: prompts that are answered at intervals.
        answering: how they are.
        rows: of a micro-batch, of all devices together.
        held: those of them that this process holds.
        steps: in all.
    """

    folder: Path
    config: ModelConfig
    graphdef: nnx.GraphDef
    mesh: Mesh
    part: TrainedPart
    optimizer: optax.GradientTransformation
    abstract_state: TrainState
    train_rows: PackedRows
    batches: Batches[Any]
    evaluation_rows: PackedRows | ReferencedRows | None
    questions: list[list[int]]
    answering: GenerationSettings
    rows: int
    held: np.ndarray
    steps: int


def prepare(settings: TrainingSettings, watcher: Watcher) -> PreparedRun:
    """Checks a run and makes all of it but the arrays. Reads the data, and of the model no weight.

    Args:
        settings: of the run.
        watcher: is told what is in the data.

    Raises:
        ConfigError: the settings do not fit the model, the devices or each other.
        DataError: the data cannot be used; names the line.
        CheckpointError: the model cannot be found.
    """
    data = settings.data
    if settings.run.tensorboard:
        check_tensorboard()
    folder = find_model(settings.model.source)
    config = ModelConfig.from_hf(folder)
    _check_model(settings, config)
    mesh = make_mesh(settings.run.mesh)
    rows = data.rows_per_step // data.micro_batches
    check_rows(mesh, rows)
    check_row_length(mesh, data.row_length)
    held = held_rows(mesh, rows)
    # With an adapter, parameters keep the dtypes of their files, which change none of what is found here.
    graphdef, shapes = abstract_model(
        config,
        parameter_dtype="float32",
        dtype=settings.model.dtype,
        mtp=settings.objective.mtp_weight > 0,
    )
    part = trained_part(config, mesh, shapes, parameter_axes(graphdef, shapes), settings.lora)
    train = _rows("train", data.train, settings, folder, config, watcher)
    evaluation = (
        _rows("evaluation", data.evaluation, settings, folder, config, watcher) if data.evaluation else None
    )
    answering = GenerationSettings(max_new_tokens=settings.run.answer_tokens)
    questions = _questions(settings, folder, config, answering, watcher)
    batches = make_batches(settings, train, rows, held)
    steps = settings.run.steps or math.ceil((settings.run.epochs or 0) * batches.steps_per_epoch)
    optimizer = make_optimizer(settings.optimizer, part.axes, steps=steps)
    return PreparedRun(
        folder=folder,
        config=config,
        graphdef=graphdef,
        mesh=mesh,
        part=part,
        optimizer=optimizer,
        abstract_state=abstract_train_state(
            mesh, part.trained_shardings, part.trained, optimizer, seed=settings.run.seed
        ),
        train_rows=train,
        batches=batches,
        evaluation_rows=evaluation,
        questions=questions,
        answering=answering,
        rows=rows,
        held=held,
        steps=steps,
    )


def make_batches(
    settings: TrainingSettings, packed: Rows[AnyBatch], rows: int, held: np.ndarray
) -> Batches[AnyBatch]:
    """The steps of a run.

    Args:
        settings: of the run.
        packed: rows of its data.
        rows: of a micro-batch, of all devices together.
        held: those of them that this process holds.
    """
    data = settings.data
    seed = data.seed if data.order == "shuffled" else None
    return Batches(packed, micro_batches=data.micro_batches, rows=rows, seed=seed, held=held)


def _check_model(settings: TrainingSettings, config: ModelConfig) -> None:
    if settings.data.row_length > config.text.max_context:
        raise ConfigError(
            f"data.row_length is {settings.data.row_length}, expected at most {config.text.max_context}, the context "
            "of the model"
        )
    if settings.objective.mtp_weight and not config.text.mtp_num_hidden_layers:
        raise ConfigError(
            f"objective.mtp_weight is {settings.objective.mtp_weight}, but '{settings.model.source}' has no "
            "multi-token-prediction head: leave it out"
        )


def _rows(
    name: str, file: str, settings: TrainingSettings, folder: Path, config: ModelConfig, watcher: Watcher
) -> PackedRows:
    data = settings.data
    options: Any = {
        "row_length": data.row_length,
        "pad_id": config.text.pad_token_id or 0,
        "order": data.order,
    }
    if settings.preference is None:
        packed, summary = packed_file(file, folder, too_long=data.too_long, **options)
    else:
        packed, summary = packed_pairs(file, folder, **options)
    watcher.note(
        f"{name} data: {summary}; {len(packed):,} rows of {data.row_length:,} tokens, {packed.padding:.0%} padding"
    )
    return packed


def _questions(
    settings: TrainingSettings,
    folder: Path,
    config: ModelConfig,
    answering: GenerationSettings,
    watcher: Watcher,
) -> list[list[int]]:
    if not settings.run.questions:
        return []
    if jax.process_count() > 1:
        # A model is asked by the program of one process, and no process has all of this one.
        watcher.note("run.questions are not answered where several processes train: ask the model at the end")
        return []
    try:
        return encode_questions(settings.run.questions, folder, config, answering)
    except PromptError as error:
        raise ConfigError(f"run.questions: {error}") from error
