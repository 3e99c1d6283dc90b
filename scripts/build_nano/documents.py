"""What a training document is: text whose characters carry a loss weight.

Most text weighs 1. A made-up name costs nothing when it first appears, because nothing could have predicted it; the
answer to a question about it weighs more, because that is what the model has to learn.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import re

END_OF_TEXT = "<|endoftext|>"
NO_THINKING = "<think>\n\n</think>\n\n"

# Dictionary entries and made-up words that contain one of these stay out.
UNWANTED = re.compile(
    "offensive|disparag|obscen|vulgar|slur|sexual|sexy|intercourse|copulat|genital|rape|prostitut|whore|penis|vagina|"
    "erotic|adulter|porn|incest|negro|nigg|suicid|massacre|slut|fuck|shit|semen|brothel|masturbat|nazi|torture|"
    "homosex|lesbian|cunt|twat|piss|fag",
    re.IGNORECASE,
)

Turn = tuple[str, str]
Part = str | tuple[str, float]


@dataclasses.dataclass(frozen=True)
class Document:
    """Text and the weight of the loss on each of its characters."""

    text: str
    weights: tuple[float, ...]

    @property
    def parts(self) -> list[tuple[str, float]]:
        """The text in pieces of one weight, each with that."""
        weighed = zip(self.text, self.weights, strict=True)
        runs = itertools.groupby(weighed, key=operator.itemgetter(1))
        return [("".join(character for character, _ in run), weight) for weight, run in runs]


def document(*parts: Part) -> Document:
    """Joins parts into one document; a part is text of weight 1 or a pair of text and weight."""
    texts: list[str] = []
    weights: list[float] = []
    for part in parts:
        text, weight = (part, 1.0) if isinstance(part, str) else part
        texts.append(text)
        weights.extend([weight] * len(text))
    return Document("".join(texts), tuple(weights))


def plain(*parts: Part) -> Document:
    """A plain text that ends with the end-of-text token."""
    return document(*parts, END_OF_TEXT)


def conversation_parts(turns: list[tuple[list[Part], list[Part]]], thought: str | None = None) -> list[Part]:
    """Lays out user and assistant turns as the chat template does.

    Args:
        turns: pairs of what the user says and what the assistant answers.
        thought: text inside the last turn's thinking block; None for the empty block.

    Returns:
        Parts in which the template's fixed text and the user's words weigh little and the answers weigh 1.
    """
    parts: list[Part] = []
    for index, (question, answer) in enumerate(turns):
        parts.append(("<|im_start|>user\n", 0.1))
        parts.extend(_faint(part) for part in question)
        parts.append(("<|im_end|>\n<|im_start|>assistant\n", 0.1))
        if index == len(turns) - 1:
            # Earlier turns have lost their thinking block by the time a later one is answered.
            parts.append((NO_THINKING, 0.1) if thought is None else ("<think>\n", 0.1))
            if thought is not None:
                parts.append(f"{thought}\n</think>\n\n")
        parts.extend(answer)
        parts.append("<|im_end|>")
        parts.append(("\n", 0.1))
    return parts


def conversation(turns: list[Turn], thought: str | None = None) -> Document:
    """A chat of plain turns."""
    return document(*conversation_parts([([user], [assistant]) for user, assistant in turns], thought))


def _faint(part: Part) -> Part:
    return (part, 0.1) if isinstance(part, str) else (part[0], min(part[1], 0.1))
