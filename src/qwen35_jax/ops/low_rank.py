"""A weight with a low-rank change beside it, which training moves while the weight stays as it is."""

from __future__ import annotations

import dataclasses
import functools
from types import EllipsisType
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from qwen35_jax.ops.precision import product_precision


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["base", "a", "b", "dropout_key"],
    meta_fields=["scale", "dropout"],
)
@dataclasses.dataclass(frozen=True)
class LowRankWeight:
    """Stands for the weight base + scale * b a, without that sum ever being held.

    It takes the place of a weight in a parameter tree. Stacked over the repeats of a layer pattern, each of its arrays
    has the leading axis of repeats, so that a scan hands every layer its own. The weight maps from the trailing axes
    `in` to the leading axes `out`; either may be several.

    Attributes:
        base: the weight itself.
        a: to `rank` numbers.
        b: from these numbers.
        dropout_key: of the inputs that the change does not see; None to let it see all.
        scale: of the change.
        dropout: share of the inputs that the change does not see.

    Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1.
    """

    base: Float[Array, "*repeats_out_in"]
    a: Float[Array, "*repeats_rank_in"]
    b: Float[Array, "*repeats_out_rank"]
    dropout_key: Key[Array, "*repeats"] | None
    scale: float
    dropout: float

    def __getitem__(self, index: EllipsisType) -> Self:
        """All of it: how modules read a parameter's value, `self.q_weight[...]`. It has no parts."""
        if index is not Ellipsis:
            raise TypeError(f"a LowRankWeight is read as a whole, with [...], not with [{index!r}]")
        return self

    def seen(self, x: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
        """Inputs as the change sees them: some are 0, the others are larger, so that their mean stays."""
        if self.dropout_key is None or self.dropout == 0:
            return x
        kept = jax.random.bernoulli(self.dropout_key, 1 - self.dropout, x.shape)
        return jnp.where(kept, x / (1 - self.dropout), 0)

    def merged(self) -> Float[Array, "*repeats_out_in"]:
        """The weight that it stands for, in the dtype of `base`; summed in float32 (float64) and rounded once."""
        dtype = functools.reduce(
            jnp.promote_types, (self.base.dtype, self.a.dtype, self.b.dtype), jnp.float32
        )
        stacked = self.a.ndim + self.b.ndim - self.base.ndim - 2
        repeats, rank = self.a.shape[:stacked], self.a.shape[stacked]
        a = self.a.astype(dtype).reshape(*repeats, rank, -1)
        b = self.b.astype(dtype).reshape(*repeats, -1, rank)
        change = jnp.einsum("...or,...ri->...oi", b, a, precision=product_precision(dtype))
        return (self.base.astype(dtype) + self.scale * change.reshape(self.base.shape)).astype(
            self.base.dtype
        )
