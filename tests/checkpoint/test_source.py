"""From a model's name to one that runs, whatever its layout on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from qwen35_jax.checkpoint import load
from qwen35_jax.checkpoint.orbax import convert_to_orbax
from qwen35_jax.checkpoint.source import convert, export
from qwen35_jax.errors import CheckpointError, ConfigError
from qwen35_jax.model import forward
from tests.checkpoint.tiny_checkpoint import (
    MOTIF,
    VOCAB,
    assert_same_parameters,
    config_json,
    random_tensors,
    tensor_shapes,
    write_checkpoint,
    write_files,
)


def test_folder_and_its_conversion_load_as_the_same_model_that_runs(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", layer_types=MOTIF)
    convert_to_orbax(tmp_path / "hf", tmp_path / "orbax")
    models = [load(tmp_path / name, dtype="float32", mtp=True) for name in ("hf", "orbax")]
    assert models[0].config == models[1].config
    assert models[0].graphdef == models[1].graphdef
    assert_same_parameters(models[0].parameters, models[1].parameters)
    for model in models:
        assert (model.folder / "tokenizer.json").is_file()
        assert (model.folder / "chat_template.jinja").is_file()
    logits = jax.jit(forward, static_argnums=0)(models[0].graphdef, models[0].parameters, jnp.arange(6)[None])
    assert logits.shape == (1, 6, VOCAB)
    assert jnp.isfinite(logits).all()


@pytest.mark.parametrize(
    ("stored", "computed"), [("bfloat16", "bfloat16"), ("float16", "bfloat16"), ("float32", "float32")]
)
def test_auto_computes_in_the_checkpoints_own_dtype(tmp_path: Path, stored: str, computed: str) -> None:
    config = config_json(vision=False, layer_types=MOTIF[2:], mtp_num_hidden_layers=0)
    shapes = tensor_shapes(config, prefix="model.", mtp=False, vision=False)
    tensors = {name: value.astype(jnp.dtype(stored)) for name, value in random_tensors(shapes).items()}
    write_files(tmp_path, config, tensors)

    def dtypes(**options: Any) -> tuple[str, str]:
        model = load(tmp_path, **options)
        kept = model.parameters["embed_tokens"]["weight"].dtype
        return str(nnx.merge(model.graphdef, model.parameters).dtype), str(kept)

    assert dtypes() == dtypes(dtype="auto", parameter_dtype="auto") == (computed, stored)
    assert dtypes(dtype="float32", parameter_dtype="auto") == ("float32", stored)
    assert dtypes(dtype="auto", parameter_dtype="float32") == ("float32", "float32")


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"holds no model: expected config\.json with model\.safetensors"
    ):
        load(tmp_path, dtype="float32")


def test_destination_in_use_is_refused_before_the_source_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for write in (convert, export):
        with pytest.raises(CheckpointError, match="exists and is not empty"):
            write("no_such_model", tmp_path)


def test_converting_an_orbax_folder_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "orbax")
    with pytest.raises(CheckpointError, match="is an Orbax folder already"):
        convert(tmp_path / "orbax", tmp_path / "again")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"dtype": "int8"}, "dtype is int8"),
        ({"dtype": "foo"}, "dtype is 'foo'"),
        ({"dtype": "float64"}, "64-bit types are off"),
        ({"parameter_dtype": "float64"}, "parameter_dtype is float64"),
    ],
)
def test_a_dtype_that_cannot_be_is_refused_before_the_model_is_looked_for(options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        load("no such model", **options)
