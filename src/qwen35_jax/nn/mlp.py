"""The SwiGLU feed-forward of the dense models."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from qwen35_jax.nn.parameter import normal, parameter


class MLP(nnx.Module):
    """down(silu(gate x) * up x). Its methods are the nodes of the graph, in order.

    Source: `Qwen3_5MLP` of the reference implementation.
    """

    def __init__(
        self,
        embed_size: int,
        mlp_size: int,
        *,
        initializer_range: float,
        parameter_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        embed, mlp = {"embed": embed_size}, {"mlp": mlp_size}
        init = normal(initializer_range)
        self.gate_weight = parameter(rngs, init, mlp | embed, parameter_dtype)
        self.up_weight = parameter(rngs, init, mlp | embed, parameter_dtype)
        self.down_weight = parameter(rngs, init, embed | mlp, parameter_dtype)

    def __call__(self, x: Float[Array, "batch time embed"]) -> Float[Array, "batch time embed"]:
        gate, up = self.gate_up(x)
        return self.down(self.act(gate, up))

    @jax.named_scope("mlp.gate_up")
    def gate_up(
        self, x: Float[Array, "batch time embed"]
    ) -> tuple[Float[Array, "batch time mlp"], Float[Array, "batch time mlp"]]:
        """The two projections to the inner width."""
        gate = jnp.einsum("btd,fd->btf", x, self.gate_weight[...].astype(x.dtype))
        up = jnp.einsum("btd,fd->btf", x, self.up_weight[...].astype(x.dtype))
        return gate, up

    @jax.named_scope("mlp.act")
    def act(
        self, gate: Float[Array, "batch time mlp"], up: Float[Array, "batch time mlp"]
    ) -> Float[Array, "batch time mlp"]:
        """silu(gate) * up."""
        return jax.nn.silu(gate) * up

    @jax.named_scope("mlp.down")
    def down(self, h: Float[Array, "batch time mlp"]) -> Float[Array, "batch time embed"]:
        """Back to the residual's width."""
        return jnp.einsum("btf,df->btd", h, self.down_weight[...].astype(h.dtype))
