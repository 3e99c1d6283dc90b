"""The parts of an assistant's answer, told apart while it arrives: thoughts, content, tool calls.

An answer is text with tags in it: `<think>...</think>` around the thoughts, of which the prompt usually holds the
opening tag already, then the content, then tool calls (see `tool_call`). The rules:

* Thoughts end at the first `</think>`. A `<think>` counts at the beginning of the answer only.
* Calls are looked for only if tools are declared. Without tools, and where what follows `<tool_call>` is no call, the
  tag is text like any other.
* A call in the thoughts is one that the model makes without having closed them, as models do, if nothing but calls
  follows it to the end of the answer, a forgotten `</think>` aside. If thought, content or a call after `</think>`
  follows, the model was only thinking about it, and it stays a part of the thoughts.
* An answer that ends in the middle of a call or of a tag ends in text: what there is of it, as it stands.
* White space beside tags belongs to the format and is left out. Content that stands on both sides of a call keeps the
  white space after the call.

The events of an answer add up to the same thoughts, content and calls, however the answer was cut into pieces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from qwen35_jax.inference.chat.messages import tool_schemas
from qwen35_jax.inference.chat.tool_call import OPENING_TAG, WHITE_SPACE, ToolCall, ToolCallReader
from qwen35_jax.inference.streaming import prefix_at_end

THINK = "<think>"
END_OF_THINK = "</think>"


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """More of the thoughts."""

    text: str


@dataclasses.dataclass(frozen=True)
class Content:
    """More of what the user is told."""

    text: str


AnswerEvent = Reasoning | Content | ToolCall


@dataclasses.dataclass(frozen=True)
class ParsedAnswer:
    """The parts of an answer.

    Attributes:
        reasoning: the thoughts, without their tags; empty if there are none.
        content: what the user is told.
        tool_calls: in the order of the answer.
    """

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def message(self) -> dict[str, Any]:
        """The answer as a message for the history of the chat."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
                for call in self.tool_calls
            ]
        return message


class AnswerParser:
    """Tells the parts of one answer apart.

    Args:
        tools: that were declared to the model, in the form of the OpenAI API.
        in_thought: whether the prompt has opened the thoughts already, see `opens_thought`.

    Raises:
        MessageError: a tool is malformed.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None = None, *, in_thought: bool = False):
        self._schemas = tool_schemas(tools or ())
        self._reads_calls = bool(tools)
        self._part: Literal["opening", "reasoning", "content"] = "opening"
        self._in_thought = in_thought
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._unread = ""
        self._call: ToolCallReader | None = None
        self._space = ""  # white space that is left out if a tag follows
        self._after_tag = False  # whether content begins behind a tag
        self._draft = ""  # calls in the thoughts, until it is known what they are
        self._drafted: list[ToolCall] = []
        self._events: list[AnswerEvent] = []

    @property
    def answer(self) -> ParsedAnswer:
        """What the events so far add up to."""
        return ParsedAnswer("".join(self._reasoning), "".join(self._content), tuple(self._calls))

    def push(self, piece: str) -> list[AnswerEvent]:
        """Takes the next piece of the answer and returns what has become certain."""
        self._unread += piece
        self._read(more_may_come=True)
        return self._released()

    def end(self) -> list[AnswerEvent]:
        """Returns the rest, once no more text can come."""
        if self._call is not None:
            self._unread, self._call = self._call.text, None
            self._reads_calls = False
        self._read(more_may_come=False)
        for call in self._drafted:
            self._tell_call(call)
        if self._part == "content" and not self._after_tag:
            self._tell_content(self._space)
        self._space, self._draft, self._drafted = "", "", []
        return self._released()

    def _read(self, *, more_may_come: bool) -> None:
        """Reads on as far as it is certain what the text is; to its end if no more may come."""
        while self._unread:
            if self._call is not None:
                if not self._read_call(self._call):
                    return
            elif self._part == "opening":
                if not self._read_opening(more_may_come):
                    return
            elif not self._read_text(more_may_come):
                return

    # Each of these returns whether it got any further.

    def _read_opening(self, more_may_come: bool) -> bool:
        bare = self._unread.lstrip(WHITE_SPACE)
        if bare.startswith(THINK):
            self._unread = bare.removeprefix(THINK)
            self._part = "reasoning"
            return True
        if more_may_come and THINK.startswith(bare):
            return False
        self._part = "reasoning" if self._in_thought else "content"
        return True

    def _read_text(self, more_may_come: bool) -> bool:
        tags = [OPENING_TAG] if self._reads_calls else []
        if self._part == "reasoning":
            tags.append(END_OF_THINK)
        found = [(start, tag) for tag in tags if (start := self._unread.find(tag)) >= 0]
        if not found:
            held = max((prefix_at_end(self._unread, tag) for tag in tags), default=0) if more_may_come else 0
            certain = len(self._unread) - held
            self._take_text(self._unread[:certain])
            self._unread = self._unread[certain:]
            return certain > 0
        start, tag = min(found)
        self._take_text(self._unread[:start])
        self._unread = self._unread[start:]
        if tag == OPENING_TAG:
            self._call = ToolCallReader(self._schemas)
        else:
            self._unread = self._unread.removeprefix(tag)
            self._part, self._after_tag, self._space = "content", True, ""
        return True

    def _read_call(self, reader: ToolCallReader) -> bool:
        reader.push(self._unread)
        self._unread = ""
        if not reader.done:
            return False
        self._call = None
        if reader.call is None:
            self._take_text(OPENING_TAG)
            self._unread = reader.text.removeprefix(OPENING_TAG)
            return True
        self._unread = reader.text[reader.position :]
        if self._part == "reasoning":
            self._draft += self._space + reader.text[: reader.position]
            self._drafted.append(reader.call)
        else:
            self._release_draft()
            self._tell_call(reader.call)
            self._after_tag = True
        self._space = ""
        return True

    def _take_text(self, text: str) -> None:
        """Takes text of the current part, and holds back the white space at its end."""
        core = text.rstrip(WHITE_SPACE)
        if not core:
            self._space += text
            return
        self._release_draft()
        (self._tell_reasoning if self._part == "reasoning" else self._tell_content)(self._space + core)
        self._space = text[len(core) :]

    def _release_draft(self) -> None:
        """Leaves the calls in the thoughts to the thoughts."""
        if self._draft:
            self._tell_reasoning(self._draft)
        self._draft, self._drafted = "", []

    def _tell_reasoning(self, text: str) -> None:
        self._reasoning.append(text if self._reasoning else text.lstrip(WHITE_SPACE))
        self._events.append(Reasoning(self._reasoning[-1]))

    def _tell_content(self, text: str) -> None:
        if not text:
            return
        self._content.append(text.lstrip(WHITE_SPACE) if self._after_tag and not self._content else text)
        self._events.append(Content(self._content[-1]))
        self._after_tag = False

    def _tell_call(self, call: ToolCall) -> None:
        self._calls.append(call)
        self._events.append(call)

    def _released(self) -> list[AnswerEvent]:
        events, self._events = self._events, []
        return events


def parse_answer(
    text: str, tools: Sequence[Mapping[str, Any]] | None = None, *, in_thought: bool = False
) -> ParsedAnswer:
    """The parts of a whole answer; arguments as for `AnswerParser`."""
    parser = AnswerParser(tools, in_thought=in_thought)
    parser.push(text)
    parser.end()
    return parser.answer


def opens_thought(prompt: str) -> bool:
    """Whether a rendered prompt ends with the opening tag of the thoughts, so that the answer begins inside them."""
    return prompt.rstrip(WHITE_SPACE).endswith(THINK)
