"""Writes nano as a folder in Hugging Face layout, weights in bfloat16."""

from __future__ import annotations

import hashlib
import json
import pathlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

from qwen35_jax.checkpoint.export import export_hf
from qwen35_jax.checkpoint.safetensors_file import open_safetensors
from qwen35_jax.config import ModelConfig
from qwen35_jax.model import Parameters
from scripts.build_nano.architecture import generation_config
from scripts.build_nano.continuations import LENGTH
from scripts.build_nano.draft_head import Round
from scripts.build_nano.vocabulary import tokenizer_config

HERE = pathlib.Path(__file__).parent
# As in the published checkpoints of the family.
FLOAT32 = ("A_log", "norm_weight")


def in_stored_dtypes(parameters: Parameters) -> Parameters:
    """Parameters as the file holds them."""

    def stored(path: tuple, leaf: jax.Array) -> jax.Array:
        return leaf.astype(jnp.float32 if path[-1].key in FLOAT32 else jnp.bfloat16)

    return jax.tree_util.tree_map_with_path(stored, parameters)


def bfloat16_rounded(parameters: Parameters) -> Parameters:
    """What a reader of the file computes with in float32."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), in_stored_dtypes(parameters))


def write_model(
    parameters: Parameters, config: ModelConfig, tokenizer: Tokenizer, destination: pathlib.Path
) -> None:
    """Writes a folder in Hugging Face layout, which appears complete or not at all.

    Args:
        parameters: in the dtypes that the file gets.
        config: of the model.
        tokenizer: of the model.
        destination: the folder, which must not be there.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        tokenizer.save(str(folder / "tokenizer.json"))
        template = (HERE / "chat_template.jinja").read_text(encoding="utf-8")
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        _write_json(folder / "tokenizer_config.json", tokenizer_config(tokenizer))
        _write_json(folder / "generation_config.json", generation_config(tokenizer))
        export_hf(parameters, config, destination, companions=folder)


def export(
    parameters: Parameters,
    config: ModelConfig,
    tokenizer: Tokenizer,
    destination: pathlib.Path,
    measured: Mapping[str, float],
    training: Mapping[str, Mapping[str, Any]],
    head_rounds: Sequence[Round],
    tokens_said: int,
    countries: int,
) -> None:
    """Writes the folder with the finished model and its card.

    Args:
        parameters: in float32.
        config: of the model.
        tokenizer: of the model.
        destination: the folder, replaced if it is there.
        measured: what the evaluation found, for the model card.
        training: sections of the config of the whole model's training, for the model card.
        head_rounds: of the head's own training, for the model card.
        tokens_said: how many tokens the head has learned from, for the model card.
        countries: how many were asked for, for the model card.
    """
    shutil.rmtree(destination, ignore_errors=True)
    write_model(in_stored_dtypes(parameters), config, tokenizer, destination)
    files = sorted(path for path in destination.iterdir())
    card = (HERE / "model_card.md").read_text(encoding="utf-8")
    (destination / "README.md").write_text(
        card.format(
            parameters=f"{_size(parameters):,}",
            mtp_parameters=f"{_size(parameters['mtp']):,}",
            countries=countries,
            steps=training["run"]["steps"],
            tokens_per_step=training["data"]["rows_per_step"] * training["data"]["row_length"],
            mtp_weight=training["objective"]["mtp_weight"],
            head_steps=sum(each.steps for each in head_rounds),
            tokens_per_head_step=head_rounds[0].rows * LENGTH,
            tokens_said=round(tokens_said, -3),
            files="\n".join(f"| {path.name} | `{_sha256(path)}` |" for path in files),
            **measured,
        ),
        encoding="utf-8",
    )


def require_same_but_for_the_head(before: pathlib.Path, after: pathlib.Path) -> None:
    """Compares two exported models.

    Raises:
        ValueError: a tensor outside the head differs by a bit, or another file than the weights and the card does.
    """
    name = "model.safetensors"
    weights, others = (open_safetensors(folder / name) for folder in (before, after))
    if weights.header != others.header:
        raise ValueError(f"{after / name}: its tensors are not laid out as those of {before / name}")
    for tensor, other in zip(weights.tensors.values(), others.tensors.values(), strict=True):
        if not tensor.name.startswith("mtp.") and tensor.read().tobytes() != other.read().tobytes():
            raise ValueError(f"{after / name}: tensor '{tensor.name}' is not that of {before / name}")
    for path in after.iterdir():
        if path.name not in (name, "README.md") and path.read_bytes() != (before / path.name).read_bytes():
            raise ValueError(f"{path}: is not what {before / path.name} is")


def _size(parameters: Parameters) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(parameters))


def _sha256(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _write_json(path: pathlib.Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
