"""The error of a grammar that cannot be made, or not be walked."""

from __future__ import annotations

import re

from qwen35_jax.errors import Qwen35Error


class GrammarError(Qwen35Error):
    """A schema or a tool that answers cannot be held to, or a walk that has left its grammar; says why."""


def reason(message: str) -> str:
    """What a message of `llguidance` says, without the place in our grammar before it and what is told below it."""
    message = re.split(r"<state>|<backtrace>|\n *\d+ \| ", message, maxsplit=1)[0]
    return re.sub(r"^at \d+\(\d+\): ", "", message).strip()
