"""Qwen3.5, 3.6 and 3.8 in JAX."""
