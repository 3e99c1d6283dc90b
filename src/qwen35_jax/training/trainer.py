"""A training run from its settings to a checkpoint in Hugging Face layout. Needs the `train` extra.

The folder of a run holds `checkpoints`, with which the next start goes on, `metrics.jsonl`, see
`qwen35_jax.training.metrics`, and at the end `model`, which is written in one piece, and `loss.png`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from qwen35_jax.checkpoint.export import export_hf
from qwen35_jax.checkpoint.hf import KeptTensors, load_hf
from qwen35_jax.checkpoint.model_name import find_model
from qwen35_jax.checkpoint.parameter_tree import dotted
from qwen35_jax.checkpoint.progress import Progress, quiet
from qwen35_jax.checkpoint.source import LoadedModel, is_orbax_folder
from qwen35_jax.checkpoint.staging import check_destination
from qwen35_jax.config import ModelConfig
from qwen35_jax.errors import CheckpointError, ConfigError, PromptError
from qwen35_jax.inference.settings import GenerationSettings
from qwen35_jax.model import Parameters, abstract_model
from qwen35_jax.sharding import parameter_axes, shardings
from qwen35_jax.training.batches import Batches, single_pass
from qwen35_jax.training.checkpoints import Checkpoints, Saved
from qwen35_jax.training.evaluation import evaluate
from qwen35_jax.training.guard import Guard
from qwen35_jax.training.loss_curve import draw_loss_curve
from qwen35_jax.training.metrics import MetricsFile, memory_bytes
from qwen35_jax.training.objective import Batch
from qwen35_jax.training.optimizers import make_optimizer, schedule
from qwen35_jax.training.packed_files import packed_file
from qwen35_jax.training.packing import PackedRows
from qwen35_jax.training.placement import (
    abstract_train_state,
    check_rows,
    make_mesh,
    place_batch,
    place_train_state,
)
from qwen35_jax.training.samples import encode_questions, sampled_answers
from qwen35_jax.training.settings import TrainingSettings, as_tables, differences
from qwen35_jax.training.stop_signals import StopRequest, stop_signals
from qwen35_jax.training.train_step import StepReport, TrainState, train_step

CHECKPOINTS, METRICS, MODEL, CURVE = "checkpoints", "metrics.jsonl", "model", "loss.png"


class Watcher:
    """Is told what a run does; this one does nothing with it."""

    def started(self, *, done: int, steps: int) -> None:
        """The steps begin: so many of them are done already."""

    def line(self, line: dict[str, Any]) -> None:
        """A step, an evaluation or answers, as `metrics.jsonl` has them."""

    def note(self, text: str) -> None:
        """A line for people."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        steps: done in all.
        began_at: steps that were done before this start.
        last: the line of the last step; None if none was left to do.
        evaluation: the line of the last evaluation of this start, if there was one.
        model: folder of the trained model; None where the run was stopped before its end.
        stopped_by: the signal that did.
    """

    steps: int
    began_at: int
    last: dict[str, Any] | None
    evaluation: dict[str, Any] | None
    model: Path | None
    stopped_by: signal.Signals | None


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """A run whose settings, files and mesh have been found good, before anything slow."""

    folder: Path
    config: ModelConfig
    mesh: Mesh
    batches: Batches
    evaluation_rows: PackedRows | None
    questions: list[list[int]]
    rows: int
    steps: int
    graphdef: nnx.GraphDef
    optimizer: optax.GradientTransformation
    parameter_shardings: Any
    abstract_state: TrainState


class Trainer:
    """Fine-tunes a model.

    Args:
        settings: of the run.
        watcher: is told how it goes.
        progress: shows how far reading and writing of the model are.
    """

    def __init__(
        self, settings: TrainingSettings, *, watcher: Watcher | None = None, progress: Progress = quiet
    ):
        self.settings = settings
        self._watcher = watcher or Watcher()
        self._progress = progress
        self._answering = GenerationSettings(max_new_tokens=settings.run.answer_tokens)

    def run(self) -> Outcome:
        """Trains from the last checkpoint in the output folder, or from the model, to the end or to a signal.

        SIGTERM and SIGINT end it after the step in hand, with a checkpoint. What cannot work is refused before anything
        is written, and before the model is read.

        Raises:
            ConfigError: the settings do not fit the model, the devices or each other.
            DataError: the data cannot be used; names the line.
            CheckpointError: the output folder cannot be written, or holds another run or a finished model, or the
                model cannot be read.
            TrainingError: the guard stopped the run; the last checkpoint is from before.
        """
        output = Path(self.settings.run.output).expanduser()
        _check_writable(output)
        prepared = self._prepare()
        tables = as_tables(self.settings)
        with Checkpoints(output / CHECKPOINTS, keep=self.settings.run.keep) as checkpoints:
            saved = checkpoints.latest()
            if saved is not None:
                _check_same_run(saved, tables, output)
                prepared.batches.set_state(saved.position)
            began_at = 0 if saved is None else saved.step
            if began_at < prepared.steps:
                check_destination(output / MODEL)
            with jax.set_mesh(prepared.mesh), stop_signals() as stop:
                state, kept = self._start(prepared, checkpoints, saved)
                metrics = MetricsFile(output / METRICS, after=began_at)
                try:
                    self._watcher.started(done=began_at, steps=prepared.steps)
                    state, last, evaluation = self._steps(prepared, state, metrics, checkpoints, tables, stop)
                finally:
                    metrics.close()
                checkpoints.wait()
            steps = int(state.step)
            model = None
            if steps >= prepared.steps:
                model = self._export(prepared, state.parameters, kept, output / MODEL)
                if not draw_loss_curve(metrics.lines, output / CURVE):
                    self._watcher.note(f"no {CURVE}, since matplotlib is not installed")
        return Outcome(steps, began_at, last, evaluation, model, None if model else stop.signal)

    def _prepare(self) -> _Prepared:
        settings = self.settings
        data = settings.data
        if jax.process_count() > 1:
            raise ConfigError(
                f"training runs in one process so far, found {jax.process_count()}: use the devices of one machine"
            )
        folder = find_model(settings.model.source)
        config = ModelConfig.from_hf(folder)
        if data.row_length > config.text.max_context:
            raise ConfigError(
                f"data.row_length is {data.row_length}, expected at most {config.text.max_context}, the context of the "
                "model"
            )
        mtp = settings.objective.mtp_weight > 0
        if mtp and not config.text.mtp_num_hidden_layers:
            raise ConfigError(
                f"objective.mtp_weight is {settings.objective.mtp_weight}, but '{settings.model.source}' has no "
                "multi-token-prediction head: leave it out"
            )
        mesh = make_mesh(settings.run.mesh)
        rows = data.rows_per_step // data.micro_batches
        check_rows(mesh, rows)
        graphdef, shapes = abstract_model(
            config, parameter_dtype="float32", dtype=settings.model.dtype, mtp=mtp
        )
        axes = parameter_axes(graphdef, shapes)
        cuts = shardings(mesh, axes, shapes)
        packed = self._rows("train", data.train, folder, config)
        evaluation = (
            None if data.evaluation is None else self._rows("evaluation", data.evaluation, folder, config)
        )
        questions = self._questions(folder, config)
        batches = Batches(packed, micro_batches=data.micro_batches, rows=rows, seed=data.seed)
        steps = settings.run.steps or math.ceil((settings.run.epochs or 0) * batches.steps_per_epoch)
        optimizer = make_optimizer(settings.optimizer, axes, steps=steps)
        return _Prepared(
            folder,
            config,
            mesh,
            batches,
            evaluation,
            questions,
            rows,
            steps,
            graphdef,
            optimizer,
            cuts,
            abstract_train_state(mesh, cuts, shapes, optimizer, seed=settings.run.seed),
        )

    def _rows(self, name: str, file: str, folder: Path, config: ModelConfig) -> PackedRows:
        data = self.settings.data
        packed, summary = packed_file(
            file,
            folder,
            row_length=data.row_length,
            too_long=data.too_long,
            pad_id=config.text.pad_token_id or 0,
        )
        self._watcher.note(
            f"{name} data: {summary}; {len(packed):,} rows of {data.row_length:,} tokens, {packed.padding:.0%} padding"
        )
        return packed

    def _questions(self, folder: Path, config: ModelConfig) -> list[list[int]]:
        if not self.settings.run.questions:
            return []
        try:
            return encode_questions(self.settings.run.questions, folder, config, self._answering)
        except PromptError as error:
            raise ConfigError(f"run.questions: {error}") from error

    def _start(
        self, prepared: _Prepared, checkpoints: Checkpoints, saved: Saved | None
    ) -> tuple[TrainState, KeptTensors | None]:
        """The state to go on from, and the tensors of the model that have no part in the training."""
        options: dict[str, Any] = {
            "parameter_dtype": "float32",
            "mtp": self.settings.objective.mtp_weight > 0,
            "shardings": prepared.parameter_shardings,
            "progress": self._progress,
        }
        if is_orbax_folder(prepared.folder):
            from qwen35_jax.checkpoint.orbax import load_orbax

            _, parameters, kept = load_orbax(prepared.folder, **options)
        else:
            _, parameters, kept = load_hf(prepared.folder, **options)
        if saved is not None:
            del parameters  # the checkpoint's take their place
            self._watcher.note(f"going on after step {saved.step:,} of {prepared.steps:,}")
            return checkpoints.restore(saved.step, prepared.abstract_state), kept
        state = place_train_state(
            parameters, prepared.optimizer, prepared.abstract_state, seed=self.settings.run.seed
        )
        return state, kept

    def _steps(
        self,
        prepared: _Prepared,
        state: TrainState,
        metrics: MetricsFile,
        checkpoints: Checkpoints,
        tables: dict[str, Any],
        stop: StopRequest,
    ) -> tuple[TrainState, dict[str, Any] | None, dict[str, Any] | None]:
        """All steps that are left: the state after them, the last step's line and the last evaluation's."""
        run = self.settings.run
        rate: Any = schedule(self.settings.optimizer, steps=prepared.steps)
        guard = Guard(
            [_parameter_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.parameters)],
            spike=run.spike,
            before=[line["cross_entropy"] for line in metrics.lines if "cross_entropy" in line],
        )
        (device, *_) = prepared.mesh.devices.flat
        last = evaluation = None
        for step in range(int(state.step) + 1, prepared.steps + 1):
            begun = time.perf_counter()
            batch = next(prepared.batches)
            state, report = train_step(
                prepared.graphdef,
                prepared.optimizer,
                self.settings.objective,
                state,
                place_batch(prepared.mesh, batch),
            )
            report = jax.device_get(report)
            guard.check(step, float(report.measures.cross_entropy), report.finite.tolist())
            last = self._step_line(step, report, batch, float(rate(step - 1)), time.perf_counter() - begun)
            last["memory_bytes"] = memory_bytes(device)
            metrics.append(last)
            self._watcher.line(last)
            ends = step == prepared.steps or stop.signal is not None
            if step == prepared.steps or (run.evaluate_every and step % run.evaluate_every == 0):
                if prepared.evaluation_rows is not None:
                    evaluation = self._evaluation_line(
                        step, prepared, prepared.evaluation_rows, state.parameters
                    )
                    metrics.append(evaluation)
                    self._watcher.line(evaluation)
                if prepared.questions:
                    answers = self._answers_line(step, prepared, state.parameters)
                    metrics.append(answers)
                    self._watcher.line(answers)
            if ends or step % run.save_every == 0:
                checkpoints.save(state, tables, prepared.batches.get_state())
            if ends:
                break
        return state, last, evaluation

    def _step_line(
        self, step: int, report: StepReport, batch: Batch, learning_rate: float, seconds: float
    ) -> dict[str, Any]:
        measures = {name: float(value) for name, value in report.measures._asdict().items()}
        if not self.settings.objective.mtp_weight:
            measures = {name: value for name, value in measures.items() if not name.startswith("mtp")}
        tokens = int(np.count_nonzero(batch.segment_ids))
        return {
            "step": step,
            **measures,
            "learning_rate": learning_rate,
            "gradient_norm": float(report.gradient_norm),
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "seconds": seconds,
        }

    def _evaluation_line(
        self, step: int, prepared: _Prepared, rows: PackedRows, parameters: Parameters
    ) -> dict[str, Any]:
        begun = time.perf_counter()
        batches: Iterator[Batch] = (
            place_batch(prepared.mesh, batch)
            for batch in single_pass(rows, micro_batches=1, rows=prepared.rows)
        )
        found = evaluate(prepared.graphdef, parameters, batches)
        return {
            "step": step,
            "evaluation_cross_entropy": found.cross_entropy,
            "evaluation_accuracy": found.accuracy,
            "seconds": time.perf_counter() - begun,
        }

    def _answers_line(self, step: int, prepared: _Prepared, parameters: Parameters) -> dict[str, Any]:
        model = LoadedModel(prepared.config, prepared.graphdef, parameters, prepared.folder)
        answers = sampled_answers(model, prepared.questions, self._answering)
        pairs = zip(self.settings.run.questions, answers, strict=True)
        return {
            "step": step,
            "answers": [{"question": question, "answer": answer} for question, answer in pairs],
        }

    def _export(
        self, prepared: _Prepared, parameters: Parameters, kept: KeptTensors | None, destination: Path
    ) -> Path:
        """Writes the trained model, unless an earlier start has done so already."""
        if not destination.exists():
            export_hf(
                parameters,
                prepared.config,
                destination,
                kept=kept,
                companions=prepared.folder,
                progress=self._progress,
            )
        return destination


def _check_writable(output: Path) -> None:
    """Makes sure that a folder can be made or written, without writing anything."""
    try:
        above = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    except OSError as error:  # a name too long
        raise CheckpointError(f"run.output {output} cannot be made: {error.strerror}") from error
    if not above.is_dir():
        raise CheckpointError(f"run.output {output} cannot be made, since {above} is a file")
    if not os.access(above, os.W_OK | os.X_OK):
        raise CheckpointError(f"run.output {output} cannot be written: no permission to write in {above}")


def _check_same_run(saved: Saved, tables: dict[str, Any], output: Path) -> None:
    if found := differences(saved.settings, tables):
        raise ConfigError(
            f"{output} holds a run of other settings ({'; '.join(found)}): go on with those of then, or choose another "
            "run.output"
        )


def _parameter_name(path: Any) -> str:
    return dotted(tuple(entry.key for entry in path))
