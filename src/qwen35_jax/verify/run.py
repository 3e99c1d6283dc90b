"""The whole comparison behind `qwen35 verify`: a checkpoint, or random narrow models of a published shape."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
from jax.typing import DTypeLike

from qwen35_jax.config import ModelConfig
from qwen35_jax.verify.comparison import (
    CUTS,
    Announce,
    checkpoint_pair,
    compare,
    random_pair,
)
from qwen35_jax.verify.float64 import one_thread
from qwen35_jax.verify.profiles import reduced_profile
from qwen35_jax.verify.report import BOUNDS, Bounds, Errors, Report


def verify_checkpoint(
    folder: Path,
    *,
    dtype: DTypeLike = jnp.float64,
    bounds: Bounds | None = None,
    lengths: Sequence[int] = tuple(CUTS),
    progress: Announce = lambda line: None,
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
    progress: Announce = lambda line: None,
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
