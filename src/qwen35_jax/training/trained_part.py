"""Which arrays a run trains and which stay as they are, found from shapes alone."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from qwen35_jax.config import ModelConfig
from qwen35_jax.model import Parameters
from qwen35_jax.sharding import shardings
from qwen35_jax.training.lora import LoRA, adapter_axes, init_adapter
from qwen35_jax.training.train_step import ParametersOf, all_trained


class TrainedPart(NamedTuple):
    """What a run trains of a model.

    Attributes:
        trained: shapes and dtypes of the arrays that are trained: the model's parameters, or an adapter.
        axes: their logical axes, a tree of the same structure.
        trained_shardings: where they lie.
        frozen: shapes and dtypes of the model's parameters that stay as they are; None where all are trained.
        frozen_shardings: where these lie; None as well.
        parameters_of: makes the model's parameters of both.
    """

    trained: Parameters
    axes: Any
    trained_shardings: Any
    frozen: Parameters | None
    frozen_shardings: Any
    parameters_of: ParametersOf


def trained_part(
    config: ModelConfig, mesh: Mesh | AbstractMesh, shapes: Parameters, axes: Any, lora: LoRA | None
) -> TrainedPart:
    """What is trained of a model, and where it lies on a mesh.

    Args:
        config: of the model.
        mesh: of the run.
        shapes: of the model's parameters, with the dtypes in which they are kept.
        axes: their logical axes, from `qwen35_jax.sharding.parameter_axes`.
        lora: the adapter that is trained; None for all parameters.

    Raises:
        ConfigError: the mesh does not fit the model, or the adapter has a target that the model has not.
    """
    cuts = shardings(mesh, axes, shapes)
    if lora is None:
        return TrainedPart(shapes, axes, cuts, None, None, all_trained)
    adapter = jax.eval_shape(functools.partial(init_adapter, config, lora), key=jax.random.key(0))
    of_adapter = adapter_axes(adapter, axes)
    return TrainedPart(adapter, of_adapter, shardings(mesh, of_adapter, adapter), shapes, cuts, lora)
