"""The configs that come with the repository are read, and fit their models and devices."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from jax.sharding import AbstractMesh, AxisType

from qwen35_jax.config import published
from qwen35_jax.model import abstract_model
from qwen35_jax.sharding import parameter_axes
from qwen35_jax.training.placement import check_row_length, check_rows
from qwen35_jax.training.settings import read_settings
from qwen35_jax.training.trained_part import trained_part

PRESETS = sorted((Path(__file__).parents[2] / "configs" / "training").glob("*.toml"))


def test_there_is_one_for_each_size_of_a_mesh() -> None:
    assert sorted(int(path.name.split("-")[0]) for path in PRESETS) == [1, 4, 8, 16, 64]


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_fits_its_model_and_its_devices(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text("")
    settings = read_settings(path)
    sizes = settings.run.mesh or {"fsdp": 1}
    assert math.prod(sizes.values()) == int(path.name.split("-")[0])
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    config = published(settings.model.source)
    assert settings.data.row_length <= config.text.max_context
    check_rows(mesh, settings.data.rows_per_step // settings.data.micro_batches)
    check_row_length(mesh, settings.data.row_length)
    graphdef, shapes = abstract_model(config, parameter_dtype="float32", dtype=settings.model.dtype)
    part = trained_part(config, mesh, shapes, parameter_axes(graphdef, shapes), settings.lora)
    assert (part.frozen is None) == (settings.lora is None)
