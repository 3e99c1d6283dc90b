"""Layer parameters moved between two ways to stack them: per pattern of layers, or every layer apart.

A checkpoint on disk is always stacked (`TextConfig.unroll_layers` false), so that a model which ran unrolled
on a CPU loads stacked on an accelerator, and the other way round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qwen35_jax.checkpoint.parameter_tree import (
    LazyParameter,
    ParameterPath,
    leaf,
    parameter_leaves,
    set_leaf,
)
from qwen35_jax.config import ModelConfig, TextConfig
from qwen35_jax.layer_groups import layer_locations


def with_unrolled_layers(config: ModelConfig, unroll_layers: bool) -> ModelConfig:
    """The same model, stacked in the given way."""
    return dataclasses.replace(config, text=dataclasses.replace(config.text, unroll_layers=unroll_layers))


def regroup(parameters: Mapping[str, Any], source: TextConfig, target: TextConfig) -> dict[str, Any]:
    """Parameters stacked as `source` says, stacked as `target` says, with a `LazyParameter` for each of a
    layer.

    Args:
        parameters: nested parameter dictionary of arrays.
        source: of the parameters.
        target: the same layers with another `unroll_layers`.
    """
    result: dict[str, Any] = {name: value for name, value in parameters.items() if name != "decoder"}
    pieces: dict[ParameterPath, list[tuple[Any, int]]] = {}
    for old, new in zip(layer_locations(source), layer_locations(target), strict=True):
        layer = leaf(parameters, ("decoder", "groups", old.group, "layers", old.position))
        for path, array in parameter_leaves(layer):
            to = ("decoder", "groups", new.group, "layers", new.position, *path)
            pieces.setdefault(to, []).append((array, old.repeat))
    for path, parts in pieces.items():
        first, _ = parts[0]
        shape = (len(parts), *first.shape[1:])
        read = lambda parts=parts: _concatenate(parts)  # noqa: E731
        set_leaf(result, path, LazyParameter(shape, np.dtype(first.dtype), read))
    return result


def _concatenate(parts: Sequence[tuple[Any, int]]) -> np.ndarray:
    if len(parts) == 1:
        array, repeat = parts[0]
        return np.asarray(array)[repeat : repeat + 1]
    return np.stack([np.asarray(array)[repeat] for array, repeat in parts])
