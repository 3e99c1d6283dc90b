"""What the backward pass computes again, so that it need not be kept from the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax

Rematerialize = Literal["all", "between_products", "none"]
"""How much of a block is computed again: `all` keeps only what goes into it, which takes the least memory and one more
forward pass; `between_products` keeps the products with weights too, most of the work, and computes norms, activations,
the delta rule and attention again; `none` keeps everything."""

_KEPT = {
    "all": None,
    "between_products": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def rematerialized(
    run: Callable[..., Any], rematerialize: Rematerialize, *, scanned: bool
) -> Callable[..., Any]:
    """A function with the same values and gradients.

    Args:
        run: of a block.
        rematerialize: how much of it is computed again.
        scanned: whether it is the body of a loop, where XLA cannot undo what is asked for, and is not kept from it.
    """
    if rematerialize == "none":
        return run
    return jax.checkpoint(run, policy=_KEPT[rematerialize], prevent_cse=not scanned)
