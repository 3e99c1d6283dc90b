"""The wiring of the multi-token-prediction head: what its fused projection reads, and from which token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from qwen35_jax.cache import init_draft_cache
from qwen35_jax.checkpoint import export_hf, load_hf
from qwen35_jax.nn.text_model import TextModel
from tests.small_text_model import difference, document, small_model

ROWS, TIME = 2, 7


def with_file_columns(folder: Path, columns: np.ndarray) -> dict[str, Any]:
    """Parameters from a checkpoint file whose `mtp.fc.weight` is this, as published: [out, embedding then hidden]."""
    model = small_model("float32", mtp=True)
    text = dataclasses.replace(model.config.text, mtp_num_hidden_layers=1)
    export_hf(model.parameters, dataclasses.replace(model.config, text=text), folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    assert tensors["mtp.fc.weight"].shape == columns.shape
    save_file(tensors | {"mtp.fc.weight": columns}, path, metadata={"format": "pt"})
    return load_hf(folder, mtp=True)[1]


class Fused(Exception):
    """Carries what the head's layer is given out of a call."""


def fused(model: TextModel, run: Callable[[], Any]) -> np.ndarray:
    def layer(x: Any, context: Any, cache: Any) -> Any:
        raise Fused(x)

    model.mtp.layer = layer
    with pytest.raises(Fused) as caught:
        run()
    return caught.value.args[0]


@pytest.mark.parametrize("half", ["embedding", "hidden"])
def test_b43_the_first_half_of_the_projection_reads_the_newest_embedding_and_the_second_the_hidden_before_it(
    tmp_path: Path, half: str
) -> None:
    small = small_model("float32", mtp=True)
    size = small.config.text.hidden_size
    identity, nothing = np.eye(size, dtype=np.float32), np.zeros((size, size), np.float32)
    columns = [identity, nothing] if half == "embedding" else [nothing, identity]
    parameters = with_file_columns(tmp_path / "saved", np.concatenate(columns, axis=1))
    model = nnx.merge(small.graphdef, parameters)
    tokens = jnp.asarray([document(seed, TIME) for seed in range(ROWS)])
    hidden, _ = model(tokens)
    memory = init_draft_cache(small.config.text, batch=ROWS, capacity=TIME, dtype="float32")
    embedding, before = model.embed(tokens)[:, 1:], hidden[:, :-1]
    if half == "embedding":
        expected, other = model.mtp.embedding_norm(embedding), model.mtp.hidden_norm(before)
    else:
        expected, other = model.mtp.hidden_norm(before), model.mtp.embedding_norm(embedding)
    assert difference(expected, other) > 0.1

    for found in (
        fused(model, lambda: model.draft_hidden(hidden, tokens))[:, : TIME - 1],
        fused(model, lambda: model.draft(before, tokens[:, 1:], memory, jnp.ones_like(tokens[:, 1:]))),
    ):
        assert difference(found, expected) <= 1e-6
