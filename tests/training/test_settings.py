"""A config file says what is meant, or is refused by one line that names the place."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from qwen35_jax.errors import ConfigError
from qwen35_jax.training.preference.objective import Preference
from qwen35_jax.training.settings import MAY_DIFFER, as_tables, differences, read_settings

LEAST = """
[data]
train = "{folder}/chats.jsonl"
row_length = 64
rows_per_step = 12

[run]
output = "{folder}/run"
steps = 7
"""


def config_file(folder: Path, more: str = "", *, least: str = LEAST) -> Path:
    (folder / "chats.jsonl").touch()
    path = folder / "run.toml"
    path.write_text(least.format(folder=folder) + more, encoding="utf-8")
    return path


def test_what_is_left_out_has_its_default(tmp_path: Path) -> None:
    settings = read_settings(config_file(tmp_path))
    assert settings.model.source == "nano" and settings.model.dtype == "bfloat16"
    assert settings.data.micro_batches == 1 and settings.data.evaluation is None
    assert settings.optimizer.name == "adamw" and settings.objective.rematerialize == "all"
    assert settings.run.steps == 7 and settings.run.epochs is None and settings.run.mesh == {}


def test_every_section_is_read_and_a_whole_number_is_a_number(tmp_path: Path) -> None:
    more = (
        'spike = inf\nquestions = ["1?", "2?"]\n'
        '[run.mesh]\ndata = 2\ntensor = 4\n[model]\ndtype = "float32"\n[objective]\nmtp_weight = 1\n'
        '[optimizer]\nname = "muon"\nlearning_rate = 1\nadam_learning_rate = 2\n'
    )
    settings = read_settings(config_file(tmp_path, more))
    assert settings.run.mesh == {"data": 2, "tensor": 4} and settings.run.spike == math.inf
    assert settings.run.questions == ("1?", "2?") and settings.run.answer_tokens == 64
    assert settings.model.dtype == "float32"
    assert settings.optimizer.name == "muon" and settings.optimizer.adam_learning_rate == 2
    for value in (settings.objective.mtp_weight, settings.optimizer.learning_rate):
        assert type(value) is float and value == 1


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ("stepps = 7", "[run] stepps is no key of this section, expected steps, perhaps"),
        ('save_every = "8"', "[run] save_every is '8', expected a whole number"),
        ("save_every = true", "[run] save_every is True, expected a whole number"),
        ("save_every = 0", "[run] save_every is 0, expected at least 1"),
        ("epochs = 2", "[run] both of steps and epochs given, expected one of the two"),
        ('questions = "1?"', "[run] questions is '1?', expected a list of texts"),
        ("questions = [1]", "[run] questions is [1], expected a list of texts"),
        ("mesh = 4", "[run] mesh is 4, expected a table of whole numbers"),
        ("[run.mesh]\ndata = 0", "[run] mesh.data is 0, expected at least 1"),
        ("[weather]\nrank = 1", "[weather] is no section, expected one of data, run, model"),
        ("[optimiser]\nname = 'adamw'", "[optimiser] is no section, expected optimizer, perhaps"),
        ("[optimizer]\nname = 'sgd'", "[optimizer] name is 'sgd', expected one of adamw, muon, adafactor"),
        ("[optimizer]\nbeta1 = 1", "[optimizer] beta1 is 1.0, expected a number from 0 to below 1"),
        ("[objective]\nz_loss = -1", "[objective] z_loss is -1.0, expected a number of at least 0"),
        (
            "[objective]\nrematerialize = 1",
            "[objective] rematerialize is 1, expected one of all, between_products, none",
        ),
        ("[model]\nsource = 3", "[model] source is 3, expected a text"),
    ],
)
def test_a_wrong_key_is_named_with_its_section_and_file(tmp_path: Path, more: str, complaint: str) -> None:
    path = config_file(tmp_path, more)
    with pytest.raises(ConfigError) as refused:
        read_settings(path)
    assert str(refused.value).startswith(f"{path}: {complaint}")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("row_length = 64", "", "[data] row_length is missing, expected a whole number"),
        ("row_length = 64", "row_length = 1", "[data] row_length is 1, expected at least 2"),
        ("row_length = 64", "row_length = 9\nmicro_batches = 5", "[data] micro_batches is 5, expected a number that"),
        ("row_length = 64", "row_length = 9\nevaluation = 'none.jsonl'", "[data] evaluation is 'none.jsonl', expected"),
        ("chats.jsonl", "none.jsonl", "[data] train is "),
        ("steps = 7", "", "[run] neither of steps and epochs given"),
        ("[data]", "[data", "is no TOML file"),
        ("[run]", "[other]", "[other] is no section"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    path = config_file(tmp_path, least=LEAST.replace(old, new))
    with pytest.raises(ConfigError) as refused:
        read_settings(path)
    assert complaint in str(refused.value) and str(refused.value).startswith(str(path))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read: No such file"):
        read_settings(tmp_path / "none.toml")


def test_a_run_goes_on_only_with_what_changes_no_step(tmp_path: Path) -> None:
    settings = read_settings(config_file(tmp_path))
    saved = json.loads(json.dumps(as_tables(settings)))
    run = dataclasses.replace(settings.run, steps=9, mesh={"data": 2}, spike=math.inf, save_every=1)
    optimizer = dataclasses.replace(settings.optimizer, learning_rate=0.5)
    data = dataclasses.replace(settings.data, seed=4, micro_batches=2)
    assert differences(saved, as_tables(settings)) == []
    changed = dataclasses.replace(settings, run=run, optimizer=optimizer, data=data)
    assert differences(saved, as_tables(changed)) == [
        "data.seed was 0 and is 4 now",
        "optimizer.learning_rate was 2e-05 and is 0.5 now",
    ]
    known = {f"{section}.{key}" for section, table in saved.items() for key in table}
    known |= {f"preference.{field.name}" for field in dataclasses.fields(Preference)}
    assert known > MAY_DIFFER
