"""How exactly matrix products are computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def product_precision(dtype: DTypeLike) -> jax.lax.Precision | None:
    """`HIGHEST` for operands of float32 and wider, the backend's default for narrower ones.

    By default TPUs and GPUs multiply float32 in bfloat16 or TF32 passes: a model asked to compute in float32 would not.
    """
    return jax.lax.Precision.HIGHEST if jnp.finfo(dtype).bits >= 32 else None
