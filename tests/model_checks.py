"""Quick checks of the text model that can be run without compilation, operation by operation (`jax.disable_jit`).

Single layers are compared with recorded values of the official implementation, and a model of two layers with itself:
documents packed and apart, tokens in one call and in several. All of it in float64. test_mutants.py proves that these
checks find faults.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qwen35_jax import model as text_model
from qwen35_jax.cache import AttentionCache, Cache, DeltaNetCache, init_cache
from qwen35_jax.checkpoint import load_hf
from qwen35_jax.layer_groups import layer_locations
from qwen35_jax.model import abstract_model
from qwen35_jax.nn.context import TokenContext
from qwen35_jax.nn.decoder import DecoderLayer
from tests.golden_records import GOLDEN, assert_close, golden

# Those of the recorded layers, so that all checks are made of the same operations.
ROWS, TIME, CAPACITY = 2, 9, 8
LINEAR_LAYER, FULL_LAYER = 2, 3


@functools.cache
def official() -> tuple[Any, dict[str, Any]]:
    """Configuration and parameters of the golden model."""
    config, parameters, _ = load_hf(GOLDEN / "model", parameter_dtype=jnp.float64)
    return config, jax.tree.map(jnp.asarray, parameters)


def layer_parameters(index: int) -> dict[str, Any]:
    config, parameters = official()
    at = list(layer_locations(config.text))[index]
    stacked = parameters["decoder"]["groups"][at.group]["layers"][at.position]
    return jax.tree.map(lambda leaf: leaf[at.repeat], stacked)


def check_layer_against_the_official_one(index: int, cache: Any, context: TokenContext, update: Any) -> None:
    config, _ = official()
    record = golden("nodes", f"layer{index}")
    layer = DecoderLayer(config.text, config.text.layer_types[index], parameter_dtype="float64", keys=None)
    layer = nnx.merge(nnx.graphdef(layer), layer_parameters(index))
    output, kept = layer(jnp.asarray(record.layer_in), context, cache)
    assert_close(output, record.layer_out)
    jax.tree.map(assert_close, kept, update)


def check_linear_layer() -> None:
    record = golden("nodes", "layer0")
    windows = (record.window_q, record.window_k, record.window_v)
    new_windows = (record.new_window_q, record.new_window_k, record.new_window_v)
    cache = jax.tree.map(jnp.asarray, DeltaNetCache(*windows, record.state))
    phases = jnp.zeros((ROWS, TIME, 0))
    context = TokenContext(phases, phases, None, jnp.full(ROWS, 5))
    check_layer_against_the_official_one(0, cache, context, DeltaNetCache(*new_windows, record.new_state))


def check_full_layer() -> None:
    record = golden("nodes", "layer3")
    # Slots behind the consumed tokens hold what some earlier answer left there.
    left = np.random.default_rng(0).standard_normal((ROWS, CAPACITY - 5, *record.past_k.shape[2:]))
    past = (jnp.concatenate([part, left], axis=1) for part in (record.past_k, record.past_v))
    context = TokenContext(jnp.asarray(record.cos), jnp.asarray(record.sin), None, jnp.full(ROWS, 5))
    check_layer_against_the_official_one(
        3, AttentionCache(*past), context, AttentionCache(record.k_rope, record.v_proj)
    )


def check_embedding_and_head() -> None:
    config, parameters = official()
    graphdef, _ = abstract_model(config, parameter_dtype="float64", dtype="float64")
    model = nnx.merge(graphdef, parameters)
    record = golden("nodes", "outside")
    assert_close(model.embed(record.tokens), record.embed)
    assert_close(model.final_norm(jnp.asarray(record.final_norm_in)), record.final_norm)
    assert_close(model.logits(jnp.asarray(record.final_norm)), record.logits)


@functools.cache
def two_layers() -> tuple[Any, nnx.GraphDef, dict[str, Any]]:
    """One layer of each kind of the golden model, with a decay so weak that nothing is forgotten."""
    config, parameters = official()
    kinds = (config.text.layer_types[LINEAR_LAYER], config.text.layer_types[FULL_LAYER])
    config = dataclasses.replace(
        config, text=dataclasses.replace(config.text, num_hidden_layers=2, layer_types=kinds)
    )
    graphdef, _ = abstract_model(config, parameter_dtype="float64", dtype="float64")
    layers = {at: layer_parameters(index) for at, index in enumerate((LINEAR_LAYER, FULL_LAYER))}
    layers[0]["mixer"]["A_log"] = jnp.full_like(layers[0]["mixer"]["A_log"], -5.0)
    stacked = jax.tree.map(lambda leaf: leaf[None], layers)
    return config.text, graphdef, parameters | {"decoder": {"groups": {0: {"layers": stacked}}}}


X, Y = np.array([7, 31, 2, 44, 18]), np.array([50, 3, 29])


def arrange(*rows: Sequence[int | np.ndarray]) -> tuple[jax.Array, jax.Array]:
    """Tokens and segment ids of rows of documents, and of numbers: so many padded tokens."""
    tokens, segment_ids = np.full((ROWS, TIME), 11), np.zeros((ROWS, TIME), np.int32)
    for row, pieces in enumerate(rows):
        at = 0
        for number, piece in enumerate(pieces, start=1):
            if isinstance(piece, int):
                at += piece
                continue
            tokens[row, at : at + len(piece)], segment_ids[row, at : at + len(piece)] = piece, number
            at += len(piece)
    return jnp.asarray(tokens), jnp.asarray(segment_ids)


def logits_of(*rows: Sequence[int | np.ndarray]) -> np.ndarray:
    _, graphdef, parameters = two_layers()
    tokens, segment_ids = arrange(*rows)
    return np.asarray(
        text_model.forward(graphdef, parameters, tokens, segment_ids=segment_ids, rematerialize="none")
    )


def check_documents_and_padding() -> None:
    alone = logits_of([Y], [X])
    packed = logits_of([X, 1, Y], [2, X])
    assert_close(packed[0, :5], alone[1, :5])
    assert_close(packed[0, 6:], alone[0, :3])
    assert_close(packed[1, 2:7], alone[1, :5])


def memory_of_row(cache: Cache, row: int) -> list[bytes]:
    return [np.asarray(leaf[:, row]).tobytes() for leaf in jax.tree.leaves(cache.groups)]


def check_continuation() -> None:
    alone = logits_of([Y], [X])
    config, graphdef, parameters = two_layers()
    cache = init_cache(config, batch=ROWS, capacity=CAPACITY, dtype="float64")

    def prefill(*rows):
        tokens, segment_ids = arrange(*rows)
        return text_model.prefill(graphdef, parameters, tokens, cache, segment_ids=segment_ids)

    def step(tokens, active):
        return text_model.decode_step(
            graphdef, parameters, jnp.asarray(tokens), cache, active=jnp.asarray(active)
        )

    logits, cache = prefill([2, X[:3]], [Y[:2]])
    assert_close(logits, np.stack([alone[1, 2], alone[0, 1]]))
    logits, cache = prefill([X[3:4], 2], [])
    assert_close(logits[0], alone[1, 3])
    before = memory_of_row(cache, 1)
    logits, cache = step([X[4], 11], [True, False])
    assert_close(logits[0], alone[1, 4])
    assert memory_of_row(cache, 1) == before
    logits, cache = step([11, Y[2]], [False, True])
    assert_close(logits[1], alone[0, 2])
    assert cache.lengths.tolist() == [5, 3]


CHECKS = (
    check_linear_layer,
    check_full_layer,
    check_embedding_and_head,
    check_documents_and_padding,
    check_continuation,
)
