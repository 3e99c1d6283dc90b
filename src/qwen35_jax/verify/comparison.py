"""Runs both implementations over the same tokens, in the three ways a model is used, and collects the errors.

A sequence is consumed as one prefill, as prefills in several pieces, and token by token behind each of them. Along
the way every node of ours is fed with what the reference fed to its own (`nodes.py`), and beside that our whole model
runs by itself, from tokens to logits, carrying its own cache.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qwen35_jax.cache import Cache, DeltaNetCache, init_cache
from qwen35_jax.checkpoint.hf import load_hf
from qwen35_jax.checkpoint.source import is_orbax_folder
from qwen35_jax.config import ModelConfig
from qwen35_jax.errors import CheckpointError
from qwen35_jax.layer_groups import layer_locations
from qwen35_jax.model import Parameters, abstract_model, decode_step, forward, prefill
from qwen35_jax.verify.capture import CallRecord, record_call
from qwen35_jax.verify.nodes import (
    NODES,
    layer_errors,
    layer_graphdef,
    outside_errors,
    pad_past,
)
from qwen35_jax.verify.reference import (
    ReferenceModel,
    float64_arithmetic,
    load_reference,
    new_cache,
    random_reference,
    write_checkpoint,
)
from qwen35_jax.verify.relative_error import relative_error
from qwen35_jax.verify.report import Errors, note_worst

BATCH = 2
DECODED = 2

# Prefill lengths, and how each is cut. 66 tokens pass the delta rule's chunk of 64, a piece of 3 is shorter than the
# convolution, and few different pieces serve all cuts, so that few programs are compiled.
CUTS: dict[int, tuple[tuple[int, ...], ...]] = {
    24: ((24,), (21, 3), (3, 21)),
    66: ((66,), (24, 21, 21), (3, 21, 21, 21)),
}
CAPACITY = max(CUTS) + DECODED

Announce = Callable[[str], None]
"""Told in a few words what begins."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """The same weights in both implementations."""

    reference: ReferenceModel
    config: ModelConfig
    graphdef: nnx.GraphDef
    parameters: Parameters
    dtype: jnp.dtype


def random_pair(hf_config: dict[str, Any], seed: int, dtype: jnp.dtype) -> Pair:
    """A reference with random weights, and ours loaded from the checkpoint that it writes."""
    with float64_arithmetic(), tempfile.TemporaryDirectory() as folder:
        reference = random_reference(hf_config, seed)
        write_checkpoint(reference, Path(folder))
        return Pair(reference, *_load_ours(Path(folder), dtype), dtype)


def checkpoint_pair(folder: Path, dtype: jnp.dtype) -> Pair:
    """A checkpoint folder loaded by both.

    Raises:
        CheckpointError: it is not in Hugging Face layout, or its files are not what they should be.
        ConfigError: its `config.json` is missing or wrong.
    """
    if is_orbax_folder(folder):
        raise CheckpointError(
            f"{folder}: is an Orbax folder, which the reference cannot read; `qwen35 export` writes one that it can"
        )
    ours = _load_ours(folder, dtype)  # first, for its one-line complaints about a broken folder
    with float64_arithmetic():
        return Pair(load_reference(folder), *ours, dtype)


def _load_ours(folder: Path, dtype: jnp.dtype) -> tuple[ModelConfig, nnx.GraphDef, Parameters]:
    parameter_dtype = None if dtype == jnp.bfloat16 else dtype
    config, parameters, _ = load_hf(folder, parameter_dtype=parameter_dtype)
    graphdef, _ = abstract_model(config, parameter_dtype=dtype, dtype=dtype)
    return config, graphdef, parameters


def compare(
    pair: Pair,
    *,
    seed: int,
    lengths: Sequence[int] = tuple(CUTS),
    progress: Announce = lambda line: None,
) -> Errors:
    """Compare a pair of models over random tokens.

    Args:
        pair: the models.
        seed: of the tokens.
        lengths: keys of `CUTS`.
        progress: told what begins.
    """
    errors = Errors()
    draw = np.random.default_rng(seed)
    for length in lengths:
        tokens = draw.integers(0, pair.config.text.vocab_size, (BATCH, length + DECODED))
        for pieces in CUTS[length]:
            cut = "one prefill" if len(pieces) == 1 else f"prefill of {' + '.join(map(str, pieces))}"
            progress(f"{length} tokens: {cut}, {DECODED} decoded")
            errors.merge(_compare_sequence(pair, tokens, pieces))
    return errors


def _compare_sequence(pair: Pair, tokens: np.ndarray, pieces: Sequence[int]) -> Errors:
    errors = Errors()
    phase = "prefill" if len(pieces) == 1 else "chunked_prefill"
    reference_cache = new_cache(pair.reference)
    cache = init_cache(pair.config.text, batch=len(tokens), capacity=CAPACITY, dtype=pair.dtype)
    start, record = 0, None
    for size in (*pieces, *[1] * DECODED):
        piece = tokens[:, start : start + size]
        with float64_arithmetic():
            record = record_call(pair.reference, piece, reference_cache)
        errors.merge(_node_errors(pair, record, start))
        ids = jnp.asarray(piece)
        if start < sum(pieces):
            logits, cache = prefill(pair.graphdef, pair.parameters, ids, cache)
        else:
            phase = "decode"
            logits, cache = decode_step(pair.graphdef, pair.parameters, ids[:, 0], cache)
        note_worst(errors.end_to_end, phase, _error(logits, record.logits[:, -1]))
        if phase == "prefill":
            logits = _forward(pair.graphdef, pair.parameters, ids)
            note_worst(errors.end_to_end, "forward", _error(logits, record.logits))
        start += size
    assert record is not None
    note_worst(errors.end_to_end, "cache", _cache_error(pair.config, cache, record))
    return errors


_forward = jax.jit(
    lambda graphdef, parameters, tokens: forward(graphdef, parameters, tokens, rematerialize="none"),
    static_argnums=0,
)


def _node_errors(pair: Pair, record: CallRecord, past: int) -> Errors:
    """Every node of one call of the reference, against ours."""
    found = []
    graphdefs = {kind: layer_graphdef(pair.config.text, kind) for kind in set(record.kinds)}
    past_lengths = np.full(len(record.tokens), past, np.int32)
    for kind, values, at in zip(record.kinds, record.layers, layer_locations(pair.config.text), strict=True):
        errors = layer_errors(
            graphdefs[kind],
            pair.parameters["decoder"]["groups"][at.group]["layers"][at.position],
            at.repeat,
            pad_past(values, CAPACITY),
            past_lengths,
            dtype=pair.dtype,
        )
        found.append((kind, errors))
    attention = next((layer for layer in record.layers if "cos" in layer), None)
    outside = {
        name: getattr(record, name) for name in ("tokens", "embed", "final_norm_in", "final_norm", "logits")
    }
    if attention is not None:
        outside |= {"cos": attention["cos"], "sin": attention["sin"]}
    positions = past + np.broadcast_to(np.arange(record.tokens.shape[1]), record.tokens.shape)
    found.append(("", outside_errors(pair.graphdef, pair.parameters, outside, positions)))

    worst = Errors()
    for kind, errors in jax.device_get(found):
        for name, value in errors.items():
            if name == "layer":
                note_worst(worst.layers, kind, value)
            else:
                note_worst(worst.nodes, name, value)
    worst.nodes = {name: worst.nodes[name] for name in NODES if name in worst.nodes}
    return worst


def _cache_error(config: ModelConfig, cache: Cache, record: CallRecord) -> float:
    """Ours, carried through all calls, against the reference's after its last one."""
    groups = jax.device_get(cache.groups)
    worst = 0.0
    for values, at in zip(record.layers, layer_locations(config.text), strict=True):
        layer = groups[at.group][at.position]
        if isinstance(layer, DeltaNetCache):
            pairs = [
                (layer.window_q, values["new_window_q"]),
                (layer.window_k, values["new_window_k"]),
                (layer.window_v, values["new_window_v"]),
                (layer.state, values["new_state"]),
            ]
        else:
            key = np.concatenate([values["past_k"], values["k_rope"]], axis=1)
            value = np.concatenate([values["past_v"], values["v_proj"]], axis=1)
            used = key.shape[1]
            pairs = [(layer.key[:, :, :used], key), (layer.value[:, :, :used], value)]
        for ours, theirs in pairs:
            worst = float(np.maximum(worst, _error(ours[at.repeat], theirs)))
    return worst


def _error(ours: Any, reference: np.ndarray) -> float:
    return float(relative_error([np.asarray(ours)], [reference], library=np))
