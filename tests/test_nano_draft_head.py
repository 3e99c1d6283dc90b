"""The training of the built-in model's draft head: it drafts as it will at run time, and nothing else moves."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qwen35_jax.cache import init_draft_cache
from qwen35_jax.inference import Tokenizer
from qwen35_jax.model import abstract_model
from scripts.build_nano.continuations import Continuations, beginning
from scripts.build_nano.dialogues import dialogue_document
from scripts.build_nano.documents import NO_THINKING
from scripts.build_nano.draft_head import OPTIMIZER, Round, drafted_ahead, with_trained_head
from tests.inference.tiny_model import TinyModel
from tests.small_text_model import COMPILE_QUICKLY, FULL, difference, small_config
from tests.small_text_model import draw as draw_parameter
from tests.test_nano import FOLDER

ROWS, TIME, DRAFTS = 3, 11, 4


@pytest.fixture(scope="module")
def tiny() -> TinyModel:
    config = small_config((FULL,))
    graphdef, abstract = abstract_model(config, parameter_dtype="float32", dtype="float32", mtp=True)
    return TinyModel(config, graphdef, jax.tree_util.tree_map_with_path(draw_parameter, abstract))


@pytest.fixture(scope="module")
def tokens(tiny: TinyModel) -> jax.Array:
    return jax.random.randint(jax.random.key(0), (ROWS, TIME), 0, tiny.config.text.vocab_size)


def drafted_at_run_time(
    model: Any, tiny: TinyModel, hidden: jax.Array, tokens: jax.Array, last: int
) -> list[jax.Array]:
    """The head's values for the tokens after the pair of `last` and the next one, draft by draft, from its cache."""
    cache = init_draft_cache(tiny.config.text, batch=ROWS, capacity=TIME, dtype="float32")
    real = jnp.ones((ROWS, last + 1), jnp.int32)
    drafted, cache = model.draft(hidden[:, : last + 1], tokens[:, 1 : last + 2], cache, real)
    values = [drafted[:, -1]]
    for ahead in range(1, DRAFTS):
        following = tokens[:, last + 1 + ahead, None]
        drafted, cache = model.draft(values[-1][:, None], following, cache, real[:, :1])
        values.append(drafted[:, 0])
    return values


def test_the_head_drafts_in_training_as_it_does_at_run_time(tiny: TinyModel, tokens: jax.Array) -> None:
    @jax.jit(compiler_options=COMPILE_QUICKLY)
    def both(parameters):
        model = nnx.merge(tiny.graphdef, parameters)
        hidden, _ = model(tokens)
        ahead = drafted_ahead(model, hidden, tokens, DRAFTS)
        return ahead, {last: drafted_at_run_time(model, tiny, hidden, tokens, last) for last in (0, 3, 6)}

    ahead, at_run_time = both(tiny.parameters)
    for last, values in at_run_time.items():
        for draft, value in enumerate(values):
            assert difference(ahead[draft][:, last + draft], value) < 1e-5, (last, draft)


def test_training_moves_the_head_alone_and_its_guesses_come_to_hold(
    tiny: TinyModel, tokens: jax.Array
) -> None:
    noted: list[dict[str, float]] = []
    rows = Continuations(np.asarray(tokens), np.array([1, 4, 2]))
    optimizer = dataclasses.replace(
        OPTIMIZER, learning_rate=0.02, adam_learning_rate=0.004, warmup_steps=2, decay_steps=30
    )
    parameters = with_trained_head(
        tiny,
        rows,
        rounds=[Round(steps=41, rows=2, optimizer=optimizer)],
        seed=0,
        note=lambda **entries: noted.append(entries),
    )
    assert parameters.keys() == tiny.parameters.keys()
    for name, part in parameters.items():
        same = [
            a is b for a, b in zip(jax.tree.leaves(part), jax.tree.leaves(tiny.parameters[name]), strict=True)
        ]
        assert not any(same) if name == "mtp" else all(same), name
    first, last = noted[0], noted[-1]
    assert last["head_step"] == 40 and last["loss"] < first["loss"]
    assert all(last[f"draft_{draft}"] > 0.5 for draft in range(1, DRAFTS + 1)), last


@dataclasses.dataclass(frozen=True)
class Dialogues:
    """A corpus of one kind, for which no dictionary is needed."""

    tokenizer: Any

    def draw(self, kind: str, rng: random.Random, progress: float) -> Any:
        return dialogue_document(rng)


def test_a_chat_is_cut_anywhere_and_often_where_an_answer_begins() -> None:
    tokenizer = Tokenizer.from_folder(FOLDER)
    rng = random.Random(0)
    cut: list[list[int]] = [beginning(Dialogues(tokenizer.backend), "dialogues", rng) for _ in range(60)]  # type: ignore[arg-type]
    opening = tokenizer.encode(NO_THINKING)
    at_answers = sum(ids[-len(opening) :] == opening for ids in cut)
    assert all(cut) and 15 < at_answers < 45
