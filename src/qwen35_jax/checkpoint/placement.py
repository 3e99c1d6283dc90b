"""Where parameters are to be placed: a caller's tree of shardings, checked before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from qwen35_jax.checkpoint.parameter_tree import ParameterPath, dotted, parameter_leaves
from qwen35_jax.errors import CheckpointError


def check_shardings(
    shardings: Any, shapes: Mapping[ParameterPath, tuple[int, ...]], *, to_device: bool
) -> None:
    """Make sure that every parameter has a sharding that can cut it, and that there are no others.

    Args:
        shardings: nested dictionary like the parameters, of `jax.sharding.Sharding`; None asks for nothing.
        shapes: of the parameters, by their paths.
        to_device: whether the parameters are to leave the host at all.

    Raises:
        CheckpointError: names the path, what was found there and what was expected.
    """
    if shardings is None:
        return
    if not to_device:
        raise CheckpointError(
            "shardings: given together with to_device=False, which leaves parameters on the host; drop one of the two"
        )
    if not isinstance(shardings, Mapping):
        raise CheckpointError(
            f"shardings: found {_kind(shardings)}, expected a nested dictionary like the parameters with a"
            " jax.sharding.Sharding for each of them"
        )
    found = dict(parameter_leaves(shardings))
    for path, sharding in found.items():
        if path not in shapes:
            raise CheckpointError(
                f"shardings: '{dotted(path)}': found {_kind(sharding)}, {_expected(path, shapes)}"
            )
        if not isinstance(sharding, jax.sharding.Sharding):
            raise CheckpointError(
                f"shardings: '{dotted(path)}': found {_kind(sharding)}, expected a jax.sharding.Sharding"
            )
        try:
            jax.ShapeDtypeStruct(shapes[path], np.float32, sharding=sharding)  # complains about too many axes
            sharding.shard_shape(shapes[path])
        except ValueError as error:
            (reason, *_) = str(error).splitlines()
            raise CheckpointError(
                f"shardings: '{dotted(path)}': cannot cut the parameter's shape {list(shapes[path])}: {reason}"
            ) from error
    for path in shapes:
        if path not in found:
            raise CheckpointError(
                f"shardings: '{dotted(path)}': missing, expected one for every parameter of the model as it is loaded"
            )


def _expected(path: ParameterPath, shapes: Mapping[ParameterPath, tuple[int, ...]]) -> str:
    """What belongs at a path that is not that of a parameter."""
    if any(parameter[: len(path)] == path for parameter in shapes):
        return "expected a dictionary of several parameters there"
    text = tuple(map(str, path))
    if any(tuple(map(str, parameter)) == text for parameter in shapes):
        return "expected whole numbers as keys of groups and layers, as in the parameters"
    return "but the model as it is loaded has no such parameter; leave it out"


def _kind(value: object) -> str:
    if isinstance(value, jax.sharding.PartitionSpec):
        return "a PartitionSpec without a mesh"
    return "None" if value is None else f"a {type(value).__name__}"
