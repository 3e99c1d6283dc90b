"""`python -m qwen35_jax`, the same as the `qwen35` command."""

from qwen35_jax.cli.main import program

program()
