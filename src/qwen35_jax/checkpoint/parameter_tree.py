"""The nested parameter dictionary: leaves addressed by the keys that lead to them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

ParameterPath = tuple[str | int, ...]
"""Keys that lead to a leaf."""


def dotted(path: ParameterPath) -> str:
    """A parameter's path as one word, for messages."""
    return ".".join(map(str, path))


def leaf(tree: Any, path: ParameterPath) -> Any:
    """The leaf that `path` leads to."""
    for key in path:
        tree = tree[key]
    return tree


def set_leaf(tree: dict[Any, Any], path: ParameterPath, value: Any) -> None:
    """Put a leaf in its place, making the dictionaries on the way."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def parameter_leaves(
    tree: Mapping[Any, Any], path: ParameterPath = ()
) -> Iterator[tuple[ParameterPath, Any]]:
    """Every leaf with its path."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from parameter_leaves(value, (*path, key))
        else:
            yield (*path, key), value


@dataclasses.dataclass(frozen=True)
class LazyParameter:
    """A leaf whose values are elsewhere until `read` brings them to host memory."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize
