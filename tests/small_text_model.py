"""A small text model with no two sizes alike, and the programs that tests of the model share.

Its decay is weak, so that whatever a row has read stays in its memory: under a strong decay a state that is lost
moves no answer, and a test for it passes wrongly. All calls have one shape (rows are filled up with padding), so that
each program compiles once.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qwen35_jax.cache import Cache, init_cache
from qwen35_jax.config import LayerKind, ModelConfig, RopeConfig, TextConfig
from qwen35_jax.model import abstract_model, decode_step, forward, prefill

LINEAR, FULL = "linear_attention", "full_attention"
ROWS, TIME, CAPACITY = 3, 42, 48
REAL_IDS, PAD_IDS = range(60), range(60, 97)
BOUNDS = {"float64": 1e-12, "float32": 1e-5}


def small_config(layer_types: tuple[LayerKind, ...] = (LINEAR, FULL) * 2, **changes: Any) -> ModelConfig:
    text = TextConfig(
        vocab_size=97,
        hidden_size=40,
        intermediate_size=56,
        num_hidden_layers=len(layer_types),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=12,
        layer_types=layer_types,
        rope=RopeConfig(mrope_section=(2, 1, 1)),
    )
    return ModelConfig(text=dataclasses.replace(text, **changes), tie_word_embeddings=False)


def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Random values of a parameter, the same in every dtype. No norm weight is what it starts as."""
    rng = np.random.default_rng(zlib.crc32(jax.tree_util.keystr(path).encode()))
    name = path[-1].key
    if name == "A_log":
        value = rng.uniform(-5.5, -4.8, leaf.shape)
    elif name == "dt_bias":
        value = rng.uniform(-1.0, 0.0, leaf.shape)
    elif name == "norm_weight" or "norm" in jax.tree_util.keystr(path):
        value = (name == "norm_weight") + 0.3 * rng.standard_normal(leaf.shape)
    else:
        value = 0.2 * rng.standard_normal(leaf.shape)
    return jnp.asarray(value, jnp.float32).astype(leaf.dtype)


@dataclasses.dataclass(frozen=True)
class SmallModel:
    """A model with its parameters. `dtype` is that of the computation."""

    config: ModelConfig
    graphdef: nnx.GraphDef
    parameters: dict[str, Any]
    dtype: str

    def new_cache(self, rows: int = ROWS, capacity: int = CAPACITY) -> Cache:
        return init_cache(self.config.text, batch=rows, capacity=capacity, dtype=self.dtype)

    def prefill(self, rows: Sequence[Sequence[int | np.ndarray]], cache: Cache) -> tuple[np.ndarray, Cache]:
        """Prefill of rows as `arrange` takes them."""
        tokens, segment_ids = arrange(rows)
        logits, cache = prefill(self.graphdef, self.parameters, tokens, cache, segment_ids=segment_ids)
        return np.asarray(logits), cache

    def step(
        self, tokens: Sequence[int], cache: Cache, active: Sequence[bool] = (True,) * ROWS
    ) -> tuple[np.ndarray, Cache]:
        logits, cache = decode_step(
            self.graphdef,
            self.parameters,
            np.asarray(tokens, np.int32),
            cache,
            active=np.asarray(active),
        )
        return np.asarray(logits), cache


@functools.cache
def small_model(
    dtype: str, layer_types: tuple[LayerKind, ...] = (LINEAR, FULL) * 2, *, mtp: bool = False
) -> SmallModel:
    """Float64 models are to be made and used under `jax.enable_x64(True)`."""
    config = small_config(layer_types)
    graphdef, abstract = abstract_model(config, parameter_dtype="float32", dtype=dtype, mtp=mtp)
    parameters = jax.tree_util.tree_map_with_path(draw, abstract)
    if dtype == "float64":
        # All of them, so that no gradient is rounded to a narrower parameter.
        parameters = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), parameters)
    return SmallModel(config, graphdef, parameters, dtype)


# Compiling takes most of the time of these tests, and their arrays are small.
COMPILE_QUICKLY = {"xla_backend_optimization_level": 0}


@jax.jit(static_argnums=0, compiler_options=COMPILE_QUICKLY)
def logits_of(graphdef, parameters, tokens, segment_ids):
    return forward(graphdef, parameters, tokens, segment_ids=segment_ids, rematerialize="none")


@jax.jit(static_argnums=0, static_argnames="rematerialize", compiler_options=COMPILE_QUICKLY)
def logits_and_gradient(graphdef, parameters, tokens, segment_ids, cotangent, *, rematerialize="all"):
    """The logits, and the gradient of the sum of `cotangent` times logits by every parameter."""
    logits, pull_back = jax.vjp(
        lambda parameters: forward(
            graphdef, parameters, tokens, segment_ids=segment_ids, rematerialize=rematerialize
        ),
        parameters,
    )
    return logits, pull_back(cotangent)[0]


def document(seed: int, length: int) -> np.ndarray:
    """Random ids, none of them used as padding."""
    return np.random.default_rng(seed).integers(REAL_IDS.start, REAL_IDS.stop, length, dtype=np.int32)


def arrange(rows: Sequence[Sequence[int | np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and segment ids of ROWS rows; each is a list of documents, and of numbers: so many padded tokens.

    Padding holds random ids, none of them that of a real token.
    """
    tokens = np.random.default_rng(0).integers(PAD_IDS.start, PAD_IDS.stop, (ROWS, TIME), dtype=np.int32)
    segment_ids = np.zeros((ROWS, TIME), np.int32)
    for row, pieces in enumerate(rows):
        at, number = 0, 0
        for piece in pieces:
            if isinstance(piece, int):
                at += piece
                continue
            number += 1
            tokens[row, at : at + len(piece)] = piece
            segment_ids[row, at : at + len(piece)] = number
            at += len(piece)
        assert at <= TIME
    return tokens, segment_ids


def difference(ours: Any, reference: Any) -> float:
    """Largest absolute difference over the largest absolute reference value; NaN where there is one."""
    ours, reference = (np.asarray(x).astype(np.float64) for x in (ours, reference))
    chex.assert_equal_shape([ours, reference])
    scale = np.abs(reference).max()
    return float(np.abs(ours - reference).max() / (scale if scale else 1.0))


def tree_difference(ours: Any, reference: Any) -> float:
    """`difference` of the array where it is largest."""
    chex.assert_trees_all_equal_structs(ours, reference)
    return max(jax.tree.leaves(jax.tree.map(difference, ours, reference)))
