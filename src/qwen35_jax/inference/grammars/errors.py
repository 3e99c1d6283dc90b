"""The error of a grammar that cannot be made, or not be walked."""

from __future__ import annotations

import re
from typing import Literal

from qwen35_jax.errors import Qwen35Error


class GrammarError(Qwen35Error):
    """A schema or a tool that answers cannot be held to, or a walk that has left its grammar; says why."""


class ToolError(GrammarError):
    """A tool that calls cannot be held to.

    Attributes:
        tool: its name.
        part: of the tool that is at fault.
    """

    def __init__(self, complaint: str, tool: str, part: Literal["name", "parameters"]):
        super().__init__(complaint)
        self.tool = tool
        self.part: Literal["name", "parameters"] = part


def reason(message: str) -> str:
    """What a message of `llguidance` says, without the place in our grammar before it and what is told below it."""
    message = re.split(r"<state>|<backtrace>|\n *\d+ \| ", message, maxsplit=1)[0]
    return re.sub(r"^at \d+\(\d+\): ", "", message).strip()
