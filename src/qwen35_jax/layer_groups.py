"""How a list of layer kinds is folded into repeated patterns, so that a stack compiles as one loop per pattern."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from qwen35_jax.config import LayerKind, TextConfig


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """`pattern` written out once, run `repeats` times."""

    pattern: tuple[LayerKind, ...]
    repeats: int


@dataclasses.dataclass(frozen=True)
class LayerLocation:
    """Where a layer of the checkpoint lies among the groups."""

    group: int
    repeat: int
    position: int


def layer_groups(config: TextConfig) -> tuple[LayerGroup, ...]:
    """How a model's layers are stacked and scanned; with `unroll_layers`, one group that is run once.

    Every published model is one group: (linear, linear, linear, full), repeated. A list with an irregular tail
    becomes two groups, and one without any regularity an unrolled loop.
    """
    if config.unroll_layers:
        return (LayerGroup(config.layer_types, 1),)
    return shortest_grouping(config.layer_types)


@functools.lru_cache(maxsize=64)
def shortest_grouping(layer_types: tuple[LayerKind, ...]) -> tuple[LayerGroup, ...]:
    """The grouping that writes out the fewest layers; among those, the one with the fewest groups."""
    total = len(layer_types)
    # best[i]: (layers written out, groups) of the best grouping of layer_types[i:].
    best: list[tuple[int, int, tuple[LayerGroup, ...]]] = [(0, 0, ())] * (total + 1)
    for start in reversed(range(total)):
        candidates = []
        for length in range(1, total - start + 1):
            pattern = layer_types[start : start + length]
            end, repeats = start + length, 1
            while True:
                written, groups, rest = best[end]
                candidates.append((written + length, groups + 1, (LayerGroup(pattern, repeats), *rest)))
                if layer_types[end : end + length] != pattern:
                    break
                end, repeats = end + length, repeats + 1
        best[start] = min(candidates, key=lambda candidate: candidate[:2])
    return best[0][2]


def layer_locations(config: TextConfig) -> Iterator[LayerLocation]:
    """The location of layer 0, layer 1, ... of the checkpoint."""
    for index, group in enumerate(layer_groups(config)):
        for repeat in range(group.repeats):
            for position in range(len(group.pattern)):
                yield LayerLocation(index, repeat, position)
