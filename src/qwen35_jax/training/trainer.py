"""A training run from its settings to a checkpoint in Hugging Face layout. Needs the `train` extra.

The folder of a run holds `checkpoints`, with which the next start goes on, `metrics.jsonl`, see
`qwen35_jax.training.metrics`, and at the end `model`, where an adapter was trained also `adapter`, each of which is
written in one piece, and `loss.png`.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from qwen35_jax.checkpoint.parameter_tree import dotted
from qwen35_jax.checkpoint.progress import Progress, quiet
from qwen35_jax.checkpoint.source import LoadedModel
from qwen35_jax.checkpoint.staging import check_destination
from qwen35_jax.chips import peak_flops
from qwen35_jax.errors import CheckpointError, ConfigError
from qwen35_jax.model import Parameters
from qwen35_jax.training.batches import Rows, single_pass
from qwen35_jax.training.checkpoints import Checkpoints, Saved
from qwen35_jax.training.evaluation import evaluate
from qwen35_jax.training.flops import StepWork, step_work, token_counts
from qwen35_jax.training.guard import Guard
from qwen35_jax.training.loss_curve import draw_loss_curve
from qwen35_jax.training.metrics import memory_bytes
from qwen35_jax.training.optimizers import schedule
from qwen35_jax.training.packing import PackedRows
from qwen35_jax.training.placement import AnyBatch, place_batch
from qwen35_jax.training.preference.evaluation import evaluate_preferences
from qwen35_jax.training.preference.rows import ReferencedRows
from qwen35_jax.training.preference.run import with_reference
from qwen35_jax.training.preparation import PreparedRun, prepare
from qwen35_jax.training.processes import check_alike, is_first
from qwen35_jax.training.record import Record
from qwen35_jax.training.samples import sampled_answers
from qwen35_jax.training.settings import TrainingSettings, as_tables, differences
from qwen35_jax.training.starting_model import (
    ADAPTER,
    MODEL,
    StartingModel,
    export_trained,
    first_state,
    load_starting_model,
)
from qwen35_jax.training.stop_signals import StopRequest, stop_signals
from qwen35_jax.training.train_step import StepReport, TrainState, train_step
from qwen35_jax.training.watcher import Watcher

CHECKPOINTS, CURVE = "checkpoints", "loss.png"


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


class Trainer:
    """Fine-tunes a model. Several processes that are joined, see `qwen35_jax.training.processes`, all do it together.

    Args:
        settings: of the run, the same in all processes.
        watcher: is told how it goes.
        progress: shows how far reading and writing of the model are.
    """

    def __init__(
        self, settings: TrainingSettings, *, watcher: Watcher | None = None, progress: Progress = quiet
    ):
        self.settings = settings
        self._watcher = watcher or Watcher()
        self._progress = progress

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
        prepared = prepare(self.settings, self._watcher)
        tables = as_tables(self.settings)
        with Checkpoints(output / CHECKPOINTS, keep=self.settings.run.keep) as checkpoints:
            saved = checkpoints.latest()
            if saved is not None:
                _check_same_run(saved, tables, output)
                prepared.batches.set_state(saved.position)
            began_at = 0 if saved is None else saved.step
            check_alike(
                {
                    "the settings": str(tables),
                    "the data": str(prepared.batches.get_state()),
                    f"the checkpoints in {output}": str(began_at),
                }
            )
            if began_at < prepared.steps:
                for name in (MODEL, ADAPTER):
                    check_destination(output / name)
            with jax.set_mesh(prepared.mesh), stop_signals() as stop:
                prepared, state, start = self._start(prepared, checkpoints, saved, output)
                record = Record(
                    output,
                    after=began_at,
                    tensorboard=self.settings.run.tensorboard,
                    watcher=self._watcher,
                )
                try:
                    self._watcher.started(done=began_at, steps=prepared.steps)
                    state, last, evaluation = self._steps(
                        prepared, state, start.frozen, record, checkpoints, tables, stop
                    )
                finally:
                    record.close()
                checkpoints.wait()
            steps = int(state.step)
            model = None
            if steps >= prepared.steps:
                model = export_trained(prepared, state.parameters, start, output, self._progress)
                if is_first() and not draw_loss_curve(record.lines, output / CURVE):
                    self._watcher.note(f"no {CURVE}, since matplotlib is not installed")
        return Outcome(steps, began_at, last, evaluation, model, None if model else stop.signal)

    def _start(
        self, prepared: PreparedRun, checkpoints: Checkpoints, saved: Saved | None, output: Path
    ) -> tuple[PreparedRun, TrainState, StartingModel]:
        """The run with all that its steps need, the state to go on from, and the model that the run began with."""
        start = load_starting_model(prepared, self.settings, self._progress)
        if self.settings.preference is not None:
            reference = start.parameters if start.frozen is None else start.frozen
            assert reference is not None, "a run begins with a model"
            if saved is None:
                self._watcher.note("asking the model about both answers of every pair, before it learns")
            prepared = with_reference(prepared, self.settings, reference, output, resumed=saved is not None)
            del reference  # or a state that is made of it could not take its memory
        parameters, start = start.parameters, start._replace(parameters=None)
        if saved is None:
            return prepared, first_state(prepared, self.settings, parameters), start
        del parameters  # the checkpoint's take their place
        self._watcher.note(f"going on after step {saved.step:,} of {prepared.steps:,}")
        return prepared, checkpoints.restore(saved.step, prepared.abstract_state), start

    def _steps(
        self,
        prepared: PreparedRun,
        state: TrainState,
        frozen: Parameters | None,
        record: Record,
        checkpoints: Checkpoints,
        tables: dict[str, Any],
        stop: StopRequest,
    ) -> tuple[TrainState, dict[str, Any] | None, dict[str, Any] | None]:
        """All steps that are left: the state after them, the last step's line and the last evaluation's."""
        run = self.settings.run
        rate: Any = schedule(self.settings.optimizer, steps=prepared.steps)
        guarded = "cross_entropy" if self.settings.preference is None else "loss"
        guard = Guard(
            [_parameter_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.parameters)],
            spike=run.spike,
            measure=guarded.replace("_", "-"),
            before=[line[guarded] for line in record.lines if guarded in line],
        )
        work = step_work(
            prepared.config,
            adapter=prepared.part.frozen is not None,
            mtp=self.settings.objective.mtp_weight > 0,
        )
        last = evaluation = None
        for step in range(int(state.step) + 1, prepared.steps + 1):
            begun = time.perf_counter()
            batch = place_batch(prepared.mesh, next(prepared.batches))
            tokens, pairs = token_counts(batch.segment_ids)
            state, report = train_step(
                prepared.graphdef,
                prepared.optimizer,
                self.settings.minimized,
                state,
                batch,
                frozen,
                parameters_of=prepared.part.parameters_of,
            )
            report = jax.device_get(report)
            guard.check(step, float(getattr(report.measures, guarded)), report.finite.tolist())
            seconds = time.perf_counter() - begun
            last = {
                **self._step_line(step, report, int(tokens), float(rate(step - 1)), seconds),
                **_speed(prepared.mesh, work, float(tokens), float(pairs), seconds),
                "memory_bytes": memory_bytes(prepared.mesh.local_devices[0]),
            }
            record.line(last)
            stop.agree()
            ends = step == prepared.steps or stop.signal is not None
            if step == prepared.steps or (run.evaluate_every and step % run.evaluate_every == 0):
                parameters = prepared.part.parameters_of(state.parameters, frozen, None)
                if prepared.evaluation_rows is not None:
                    evaluation = self._evaluation_line(step, prepared, prepared.evaluation_rows, parameters)
                    record.line(evaluation)
                if prepared.questions:
                    answers = self._answers_line(step, prepared, parameters)
                    record.line(answers)
            if ends or step % run.save_every == 0:
                checkpoints.save(state, tables, prepared.batches.get_state())
            if ends:
                break
        return state, last, evaluation

    def _step_line(
        self, step: int, report: StepReport, tokens: int, learning_rate: float, seconds: float
    ) -> dict[str, Any]:
        measures = {name: float(value) for name, value in report.measures._asdict().items()}
        if not self.settings.objective.mtp_weight:
            measures = {name: value for name, value in measures.items() if not name.startswith("mtp")}
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
        self, step: int, prepared: PreparedRun, rows: PackedRows | ReferencedRows, parameters: Parameters
    ) -> dict[str, Any]:
        begun = time.perf_counter()

        def placed(rows: Rows[AnyBatch]) -> Iterator[AnyBatch]:
            batches = single_pass(rows, micro_batches=1, rows=prepared.rows, held=prepared.held)
            return (place_batch(prepared.mesh, batch) for batch in batches)

        if self.settings.preference is None:
            assert isinstance(rows, PackedRows), "rows without references"
            found = evaluate(prepared.graphdef, parameters, placed(rows))
            measured = {"cross_entropy": found.cross_entropy, "accuracy": found.accuracy}
        else:
            assert isinstance(rows, ReferencedRows), "rows with references"
            preference = self.settings.preference
            found = evaluate_preferences(prepared.graphdef, parameters, placed(rows), preference)
            measured = {"loss": found.loss, "accuracy": found.accuracy, "margin": found.margin}
        return {
            "step": step,
            **{f"evaluation_{name}": value for name, value in measured.items()},
            "seconds": time.perf_counter() - begun,
        }

    def _answers_line(self, step: int, prepared: PreparedRun, parameters: Parameters) -> dict[str, Any]:
        model = LoadedModel(prepared.config, prepared.graphdef, parameters, prepared.folder)
        answers = sampled_answers(model, prepared.questions, prepared.answering)
        pairs = zip(self.settings.run.questions, answers, strict=True)
        return {
            "step": step,
            "answers": [{"question": question, "answer": answer} for question, answer in pairs],
        }


def _speed(mesh: Mesh, work: StepWork, tokens: float, pairs: float, seconds: float) -> dict[str, float]:
    done = work.flops(tokens, pairs) / seconds
    peak = peak_flops(mesh.devices.flat[0].device_kind)
    return {"flops_per_second": done} | ({} if peak is None else {"utilization": done / (peak * mesh.size)})


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
