"""The built-in model without its weights, behind a server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from qwen35_jax.checkpoint.model_name import find_model
from qwen35_jax.config import ModelConfig
from qwen35_jax.inference.server.app import create_app
from qwen35_jax.inference.server.served_model import ServedModel
from tests.inference.server.scripted_engine import ScriptedEngine

MAX_BODY_BYTES = 20_000


@pytest.fixture(scope="session")
def served() -> ServedModel:
    folder = find_model("nano")
    return ServedModel.from_folder("nano", folder, ModelConfig.from_hf(folder).text)


@pytest.fixture
def engine(served: ServedModel) -> ScriptedEngine:
    return ScriptedEngine(served.tokenizer)


@pytest.fixture
def client(engine: ScriptedEngine, served: ServedModel) -> Iterator[TestClient]:
    app = create_app(
        engine,  # pyright: ignore[reportArgumentType]
        served,
        api_key=None,
        local=False,
        max_body_bytes=MAX_BODY_BYTES,
        most_choices=8,
    )
    with TestClient(app) as client:
        yield client
