"""Writes nano as a folder in Hugging Face layout, weights in bfloat16."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

from qwen35_jax.checkpoint.export import export_hf
from qwen35_jax.config import ModelConfig
from qwen35_jax.model import Parameters
from scripts.build_nano.architecture import generation_config
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


def export(
    parameters: Parameters,
    config: ModelConfig,
    tokenizer: Tokenizer,
    destination: pathlib.Path,
    measured: Mapping[str, float],
) -> None:
    """Writes every file of the folder but the model card, and what was measured as `measured.json` beside it."""
    shutil.rmtree(destination, ignore_errors=True)
    export_hf(in_stored_dtypes(parameters), config, destination)
    tokenizer.save(str(destination / "tokenizer.json"))
    template = (HERE / "chat_template.jinja").read_text(encoding="utf-8")
    (destination / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_json(destination / "tokenizer_config.json", tokenizer_config(tokenizer))
    _write_json(destination / "generation_config.json", generation_config(tokenizer))
    _write_json(destination.with_name("measured.json"), dict(measured))


def _write_json(path: pathlib.Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
