"""The SwiGLU feed-forward of the dense models."""

from __future__ import annotations

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from qwen35_jax.nn.parameter import Keys, normal, parameter
from qwen35_jax.nn.projection import merge_heads, project


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
        keys: Keys,
    ):
        embed, mlp = {"embed": embed_size}, {"mlp": mlp_size}
        init = normal(initializer_range)
        self.gate_weight = parameter(keys, init, mlp | embed, parameter_dtype)
        self.up_weight = parameter(keys, init, mlp | embed, parameter_dtype)
        self.down_weight = parameter(keys, init, embed | mlp, parameter_dtype)

    def __call__(self, x: Float[Array, "batch time embed"]) -> Float[Array, "batch time embed"]:
        gate, up = self.gate_up(x)
        return self.down(self.act(gate, up))

    @jax.named_scope("mlp.gate_up")
    def gate_up(
        self, x: Float[Array, "batch time embed"]
    ) -> tuple[Float[Array, "batch time mlp"], Float[Array, "batch time mlp"]]:
        """The two projections to the inner width."""
        gate = project(x, self.gate_weight[...])
        up = project(x, self.up_weight[...])
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
        return merge_heads(h, self.down_weight[...])
