"""What a training run is: the sections of its config file, checked before anything slow.

A config file is TOML. A section is one of the classes below, its keys are the attributes, and what is left out has the
default that stands there:

    [model]
    source = "Qwen/Qwen3.5-0.8B"

    [data]
    train = "chats.jsonl"
    row_length = 2048
    rows_per_step = 16

    [optimizer]
    learning_rate = 2e-5

    [run]
    output = "runs/first"
    epochs = 2

Paths are relative to the folder in which the command runs, as those of all commands are.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from qwen35_jax.errors import ConfigError
from qwen35_jax.training.lora import LoRA
from qwen35_jax.training.objective import Objective
from qwen35_jax.training.optimizers import OptimizerSettings
from qwen35_jax.training.preference.objective import Preference
from qwen35_jax.training.train_step import StepObjective


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """Which model is trained.

    Attributes:
        source: where it starts, see `find_model`.
        dtype: of the computation. Parameters are kept and updated in float32 in any case.
    """

    source: str = "nano"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """What it learns from.

    Attributes:
        train: a JSONL file, see `qwen35_jax.training.records`.
        row_length: tokens of a row, in which documents are packed, and so of the longest document.
        rows_per_step: of all micro-batches and devices together.
        evaluation: a JSONL file that the loss is measured on at intervals; None for none.
        micro_batches: that a step's rows are taken in, one after the other, where memory does not hold all at once.
        too_long: what becomes of a longer document, see `make_dataset`.
        order: in which documents are learned: `shuffled`, another in every epoch, or `as_written`, that of the file, as
            a curriculum asks for. In the latter rows are not filled up as well.
        seed: of the shuffling.
    """

    train: str
    row_length: int
    rows_per_step: int
    evaluation: str | None = None
    micro_batches: int = 1
    too_long: Literal["drop", "cut"] = "drop"
    order: Literal["shuffled", "as_written"] = "shuffled"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("row_length", 2), ("rows_per_step", 1), ("micro_batches", 1)):
            _check(name, getattr(self, name), getattr(self, name) >= least, f"at least {least}")
        _check("seed", self.seed, 0 <= self.seed < 2**32, "a number from 0 to below 2**32")
        _check(
            "micro_batches",
            self.micro_batches,
            self.rows_per_step % self.micro_batches == 0,
            f"a number that divides the {self.rows_per_step} of rows_per_step",
        )
        for name in ("train", "evaluation"):
            path = getattr(self, name)
            _check(name, path, path is None or os.path.isfile(path), "an existing file")


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """How long, where, and what is written on the way.

    Attributes:
        output: folder of the run. One that holds a run goes on with it.
        steps: of the optimizer, all together; None where `epochs` is given.
        epochs: how often every row is seen, instead of `steps`.
        evaluate_every: steps from one evaluation to the next, where there is a file for it, and from one set of answers
            to the next. They follow the last step in any case; None for only then.
        questions: that the model is asked at these steps.
        answer_tokens: of an answer at most. Answers are greedy: always the most likely token.
        save_every: steps from one checkpoint to the next. The last step is saved in any case.
        keep: checkpoints that are kept, the newest ones.
        tensorboard: write the numbers for TensorBoard too, into the folder `tensorboard`.
        spike: nats by which a step's loss may lie above the middle one of the 20 before it; a run with a larger one
            stops, see `Guard`. `inf` for no such limit.
        seed: of what is random in a step.
        mesh: sizes of the mesh axes, of `MESH_AXES`; without any, all devices are on `fsdp`.
    """

    output: str
    steps: int | None = None
    epochs: float | None = None
    evaluate_every: int | None = None
    questions: tuple[str, ...] = ()
    answer_tokens: int = 64
    save_every: int = 100
    keep: int = 2
    tensorboard: bool = False
    spike: float = 3.0
    seed: int = 0
    mesh: dict[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            found = "both" if self.steps is not None else "neither"
            raise ConfigError(f"{found} of steps and epochs given, expected one of the two")
        for name in ("steps", "evaluate_every", "answer_tokens", "save_every", "keep"):
            value = getattr(self, name)
            _check(name, value, value is None or value >= 1, "at least 1")
        _check("epochs", self.epochs, self.epochs is None or 0 < self.epochs < math.inf, "a number above 0")
        _check("spike", self.spike, self.spike > 0, "a number above 0")
        _check("seed", self.seed, 0 <= self.seed < 2**32, "a number from 0 to below 2**32")
        for axis, size in self.mesh.items():
            _check(f"mesh.{axis}", size, size >= 1, "at least 1")


@dataclasses.dataclass(frozen=True)
class TrainingSettings:
    """A run: one attribute for each section of the file.

    With `[lora]` an adapter is trained and the model stays as it is; without, all parameters are trained. With
    `[preference]` the data are pairs of answers, see `qwen35_jax.training.preference`, and `[objective]`, which is of
    chats and texts, is left out.
    """

    data: DataSettings
    run: RunSettings
    model: ModelSettings = dataclasses.field(default_factory=ModelSettings)
    objective: Objective = dataclasses.field(default_factory=Objective)
    optimizer: OptimizerSettings = dataclasses.field(default_factory=OptimizerSettings)
    lora: LoRA | None = None
    preference: Preference | None = None

    def __post_init__(self) -> None:
        if self.preference is None:
            return
        if self.objective != Objective():
            raise ConfigError("[objective] is given beside [preference], expected only one of the two")
        if self.data.too_long == "cut":
            raise ConfigError("[data] too_long is 'cut', but pairs of answers are never cut: expected 'drop'")

    @property
    def minimized(self) -> StepObjective:
        """What the steps minimize."""
        return self.objective if self.preference is None else self.preference


MAY_DIFFER = frozenset(
    {
        "data.train",  # the position in the data knows their content
        "data.evaluation",
        "data.micro_batches",
        "objective.rematerialize",
        "preference.rematerialize",
        "run.output",
        "run.steps",
        "run.epochs",
        "run.evaluate_every",
        "run.questions",
        "run.answer_tokens",
        "run.save_every",
        "run.keep",
        "run.tensorboard",
        "run.spike",
        "run.mesh",
    }
)
"""What a run may go on with otherwise: it changes how the work is done, how long and what is told, not the steps."""


def read_settings(path: str | os.PathLike[str]) -> TrainingSettings:
    """The settings of a config file.

    Raises:
        ConfigError: the file cannot be read, or a section or key is unknown, missing, of a wrong type or out of range;
            names the file, the section and the key.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML file: {error}") from error
    try:
        return settings_from(content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def settings_from(content: Mapping[str, Any]) -> TrainingSettings:
    """The settings of a config file's content. Errors as for `read_settings`, without the file."""
    kinds = typing.get_type_hints(TrainingSettings)
    for name, table in content.items():
        if name not in kinds:
            raise ConfigError(f"[{name}] is no section, expected {_expected(name, kinds)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{name} is {table!r}, expected a section [{name}]")
    return TrainingSettings(
        **{
            name: _section(name, _without_none(kind), content.get(name, {}))
            for name, kind in kinds.items()
            if name in content or kind is _without_none(kind)
        }
    )


def as_tables(settings: TrainingSettings) -> dict[str, dict[str, Any]]:
    """The settings as JSON can hold them."""
    tables = {name: table for name, table in dataclasses.asdict(settings).items() if table is not None}
    tables["run"]["spike"] = repr(settings.run.spike)  # JSON knows no infinity
    return json.loads(json.dumps(tables))  # and no tuples


def differences(saved: Mapping[str, Mapping[str, Any]], tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What differs between the settings of a run that is to be gone on with and those given now, as sentences.

    Args:
        saved: from `as_tables`, of the run.
        tables: the same of now. Keys in `MAY_DIFFER` are not looked at.
    """
    before, now = _flat(saved), _flat(tables)
    return [
        f"{key} was {before.get(key)!r} and is {now.get(key)!r} now"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and key not in MAY_DIFFER
    ]


def _flat(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, table in tables.items() for key, value in table.items()}


def _section(name: str, kind: type, table: Mapping[str, Any]) -> Any:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    values = {}
    for key, value in table.items():
        if key not in fields:
            raise ConfigError(f"[{name}] {key} is no key of this section, expected {_expected(key, fields)}")
        if not _is_a(value, hints[key]):
            raise ConfigError(f"[{name}] {key} is {value!r}, expected {_described(hints[key])}")
        values[key] = _converted(value, hints[key])
    for key, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and key not in values:
            raise ConfigError(f"[{name}] {key} is missing, expected {_described(hints[key])}")
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"[{name}] {str(error).removeprefix(f'{name}.')}") from error


def _converted(value: Any, kind: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return float(value) if float in (kind, *typing.get_args(kind)) else value


def _without_none(kind: Any) -> Any:
    """The other option of an attribute that may be None; any other type as it is."""
    options = [option for option in typing.get_args(kind) if option is not type(None)]
    return options[0] if typing.get_origin(kind) is types.UnionType and len(options) == 1 else kind


def _expected(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"{near[0]}, perhaps" if near else "one of " + ", ".join(known)


def _is_a(value: Any, kind: Any) -> bool:
    """Whether a TOML value is of an attribute's type. A whole number is a number; true and false are none."""
    options = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return isinstance(value, str) and value in options
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return any(_is_a(value, option) for option in options)
    if typing.get_origin(kind) is dict:
        return isinstance(value, dict) and all(_is_a(entry, options[1]) for entry in value.values())
    if typing.get_origin(kind) is tuple:
        return isinstance(value, list) and all(_is_a(entry, options[0]) for entry in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _described(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(typing.get_args(kind))
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return " or ".join(_described(option) for option in typing.get_args(kind) if option is not type(None))
    if typing.get_origin(kind) is dict:
        return "a table of whole numbers"
    if typing.get_origin(kind) is tuple:
        return "a list of texts"
    return {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}[kind]


def _check(name: str, value: Any, holds: bool, expected: str) -> None:
    if not holds:
        raise ConfigError(f"{name} is {value!r}, expected {expected}")
