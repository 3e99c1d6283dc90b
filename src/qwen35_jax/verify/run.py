"""The whole comparison behind `qwen35 verify`: a checkpoint, or random narrow models of a published shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from qwen35_jax.config import ModelConfig
from qwen35_jax.verify.comparison import (
    CUTS,
    Errors,
    Progress,
    checkpoint_pair,
    compare,
    random_pair,
)
from qwen35_jax.verify.float64 import one_thread
from qwen35_jax.verify.profiles import reduced_profile


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Largest relative errors that pass.

    Attributes:
        node: of a node fed with the reference's inputs.
        end_to_end: of the whole model run by itself.
    """

    node: float
    end_to_end: float


# The reference always runs in float64, so in a narrower dtype the error is that dtype's own rounding. Float64: the
# level that a public conformance project reports for the official code against its formal specification.
BOUNDS: dict[str, Bounds] = {
    "float64": Bounds(node=4.1e-14, end_to_end=1e-12),
    "float32": Bounds(node=2e-5, end_to_end=1e-3),
    "bfloat16": Bounds(node=5e-2, end_to_end=5e-1),
}


@dataclasses.dataclass(frozen=True)
class Report:
    """What was found, and whether it is within the bounds."""

    errors: Errors
    bounds: Bounds
    dtype: str
    lengths: tuple[int, ...]
    draws: int

    @property
    def passed(self) -> bool:
        # Written so that NaN fails.
        nodes_hold = self.errors.worst_node <= self.bounds.node
        return nodes_hold and self.errors.worst_end_to_end <= self.bounds.end_to_end

    def to_json(self) -> dict[str, Any]:
        """The object that `qwen35 verify --json` prints."""
        return {
            "passed": self.passed,
            "dtype": self.dtype,
            "max_relative_error": self.errors.worst_node,
            "bound": self.bounds.node,
            "end_to_end_relative_error": self.errors.worst_end_to_end,
            "end_to_end_bound": self.bounds.end_to_end,
            "nodes": self.errors.nodes,
            "layers": self.errors.layers,
            "end_to_end": self.errors.end_to_end,
            "lengths": list(self.lengths),
            "draws": self.draws,
        }


def verify_checkpoint(
    folder: Path,
    *,
    dtype: DTypeLike = jnp.float64,
    bounds: Bounds | None = None,
    lengths: Sequence[int] = tuple(CUTS),
    progress: Progress = lambda line: None,
) -> Report:
    """Compare a checkpoint in Hugging Face layout, loaded by both implementations.

    Args:
        folder: with `config.json` and the weights.
        dtype: compute dtype of our side; float64 needs JAX's 64-bit types turned on.
        bounds: by default those of `BOUNDS`.
        lengths: of the prefills, keys of `CUTS`.
        progress: told what begins.
    """
    dtype = jnp.dtype(dtype)
    errors = compare(checkpoint_pair(folder, dtype), seed=0, lengths=lengths, progress=progress)
    return Report(errors, bounds or BOUNDS[dtype.name], dtype.name, tuple(lengths), draws=1)


def verify_reduced(
    config: ModelConfig,
    *,
    dtype: DTypeLike = jnp.float64,
    bounds: Bounds | None = None,
    draws: int = 2,
    lengths: Sequence[int] = tuple(CUTS),
    progress: Progress = lambda line: None,
) -> Report:
    """Compare random models with the layers and head ratios of `config` and narrow widths.

    Args:
        config: of any dense model; no weights are needed.
        dtype: compute dtype of our side; float64 needs JAX's 64-bit types turned on.
        bounds: by default those of `BOUNDS`.
        draws: how many times weights and tokens are drawn.
        lengths: of the prefills, keys of `CUTS`.
        progress: told what begins.
    """
    dtype = jnp.dtype(dtype)
    profile, errors = reduced_profile(config), Errors()
    for seed in range(draws):
        pair = random_pair(profile, seed, dtype)

        def told(line: str, draw: int = seed + 1) -> None:
            progress(f"draw {draw} of {draws}, {line}")

        with one_thread():
            errors.merge(compare(pair, seed=seed, lengths=lengths, progress=told))
    return Report(errors, bounds or BOUNDS[dtype.name], dtype.name, tuple(lengths), draws)
