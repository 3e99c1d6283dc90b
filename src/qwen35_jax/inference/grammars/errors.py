"""The error of a grammar that cannot be made, or not be walked."""

from qwen35_jax.errors import Qwen35Error


class GrammarError(Qwen35Error):
    """A schema or a tool that answers cannot be held to, or a walk that has left its grammar; says why."""
