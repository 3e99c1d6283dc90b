"""Logical axes to mesh axes."""

from qwen35_jax.logical_axes import RULES
from qwen35_jax.sharding.rules import cache_axes, cache_shardings, parameter_axes, shardings

__all__ = ["RULES", "cache_axes", "cache_shardings", "parameter_axes", "shardings"]
