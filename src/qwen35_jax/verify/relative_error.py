"""The measure by which values are compared with those of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from qwen35_jax.nn.parameter import compute_dtype_for_state


def relative_error(
    ours: Sequence[Array | np.ndarray],
    reference: Sequence[Array | np.ndarray],
    *,
    library: ModuleType = jnp,
) -> Float[Array, ""]:
    """Largest absolute difference over the largest absolute reference value of each array; of these, the worst.

    Where the reference is all zeros (or there are no values at all) it is the largest difference itself.
    NaN on either side gives NaN.

    Args:
        ours: arrays of any shapes.
        reference: one for each of ours.
        library: `jax.numpy` within a program, `numpy` for arrays on the host, where JAX would compile every
            operation for every shape.

    Raises:
        ValueError: the shapes differ, so that broadcasting would compare other values than meant.
    """
    errors = [library.zeros(())]
    for our, their in zip(ours, reference, strict=True):
        if our.shape != their.shape:
            raise ValueError(f"shape: found {our.shape}, the reference has {their.shape}")
        dtype = compute_dtype_for_state(jnp.promote_types(our.dtype, their.dtype))
        our, their = our.astype(dtype), their.astype(dtype)
        scale = library.max(library.abs(their), initial=0)
        difference = library.max(library.abs(our - their), initial=0)
        errors.append(difference / library.where(scale == 0, 1, scale))
    return library.max(library.stack(errors))
