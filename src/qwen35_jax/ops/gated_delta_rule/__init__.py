"""The gated delta rule, the sequence mixer of the linear-attention layers."""

from qwen35_jax.ops.gated_delta_rule.dispatch import Method, gated_delta_rule

__all__ = ["Method", "gated_delta_rule"]
