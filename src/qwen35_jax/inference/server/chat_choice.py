"""One choice of a chat's reply, as a message or as the pieces of one.

An answer that has to call a tool, and is cut short in the middle of a call, tells what there is of that call. It ends
for `length` then, whether a limit or a stop string cut it: that is the reason by which clients know such a call for one
that is not to be made.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from qwen35_jax.inference.chat.answer_parser import (
    END_OF_THINK,
    THINK,
    AnswerEvent,
    AnswerParser,
    Content,
    Reasoning,
)
from qwen35_jax.inference.chat.tool_call import ToolCall
from qwen35_jax.inference.results import FinishReason, TokenEvent, TokenLogprob
from qwen35_jax.inference.server.chat_request import ChatRequest
from qwen35_jax.inference.server.choice import JSON
from qwen35_jax.inference.server.token_texts import TokenTexts
from qwen35_jax.inference.server.unfinished_call import UnfinishedCall, unfinished_call

_Event = AnswerEvent | UnfinishedCall


class ChatChoice:
    """Tells the parts of one answer apart; see `Choice`.

    Args:
        index: of the choice.
        request: that it answers.
        token_texts: of the vocabulary, for log-probabilities.
    """

    def __init__(self, index: int, request: ChatRequest, token_texts: TokenTexts):
        self.satisfied = False
        self.reasoning_tokens = 0
        self._index = index
        self._stop_ids = frozenset(request.requests[index].stop_ids)
        self._tools = request.tools
        self._one_call = request.one_call
        self._must_call = request.must_call
        self._token_texts = token_texts
        self._parser = AnswerParser(request.tools, in_thought=request.in_thought)
        self._thoughts = _ThoughtCounter(in_thought=request.in_thought)
        self._events: list[_Event] = []  # that no stream has told of
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[JSON] = []
        self._tells_logprobs = request.top_logprobs is not None
        self._logprobs: list[JSON] = []
        self._told = 0
        self._reason: str | None = None

    def opening(self) -> list[JSON]:
        return [self._piece({"role": "assistant", "content": ""})]

    def take(self, event: TokenEvent) -> None:
        if self.satisfied:
            return
        self.reasoning_tokens = self._thoughts.count(event)
        if event.logprob is not None and event.token not in self._stop_ids:
            self._logprobs.append(self._logprob(event.logprob))
        self._keep(self._parser.push(event.text))

    def end(self, reason: FinishReason) -> None:
        whole = True
        if not self.satisfied:
            events = self._parser.end()
            if self._must_call and (
                rest := "".join(each.text for each in events if isinstance(each, Content))
            ):
                whole = False
                events = [each for each in events if not isinstance(each, Content)]
                begun = unfinished_call(rest, self._tools)
                self._keep([*events, *([] if begun is None else [begun])])
            else:
                self._keep(events)
        called = bool(self._calls) and (reason == "stop" or self.satisfied)
        self._reason = "length" if not whole else "tool_calls" if called else reason

    def released(self) -> list[JSON]:
        pieces = [self._piece(delta) for delta in self._deltas()]
        if self._reason is not None:
            pieces.append(self._piece({}))
        if pieces and self._tells_logprobs:
            pieces[0]["logprobs"] = {"content": self._logprobs[self._told :], "refusal": None}
            self._told = len(self._logprobs)
        if self._reason is not None:
            pieces[-1]["finish_reason"] = self._reason
        return pieces

    def whole(self) -> JSON:
        content = "".join(self._content)
        message: JSON = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message |= {"content": content or None, "tool_calls": self._calls}
        logprobs = {"content": self._logprobs, "refusal": None} if self._tells_logprobs else None
        return {"index": self._index, "message": message, "logprobs": logprobs, "finish_reason": self._reason}

    def _keep(self, events: Sequence[_Event]) -> None:
        for event in events:
            if self.satisfied:
                return
            self._events.append(event)
            if isinstance(event, ToolCall | UnfinishedCall):
                self._calls.append(_call(event))
                self.satisfied = self._one_call
            else:
                (self._reasoning if isinstance(event, Reasoning) else self._content).append(event.text)

    def _deltas(self) -> list[JSON]:
        """The events since the last call, neighbours of one kind together."""
        deltas: list[JSON] = []
        calls_told = len(self._calls) - sum(
            isinstance(each, ToolCall | UnfinishedCall) for each in self._events
        )
        for event in self._events:
            if isinstance(event, ToolCall | UnfinishedCall):
                deltas.append({"tool_calls": [{"index": calls_told} | self._calls[calls_told]]})
                calls_told += 1
                continue
            key = "reasoning_content" if isinstance(event, Reasoning) else "content"
            if deltas and key in deltas[-1]:
                deltas[-1][key] += event.text
            else:
                deltas.append({key: event.text})
        self._events.clear()
        return deltas

    def _piece(self, delta: JSON) -> JSON:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprob(self, told: TokenLogprob) -> JSON:
        return self._entry(told.token, told.logprob) | {
            "top_logprobs": [self._entry(token, logprob) for token, logprob in told.top]
        }

    def _entry(self, token: int, logprob: float) -> JSON:
        texts = self._token_texts
        return {"token": texts.text_of(token), "logprob": logprob, "bytes": list(texts.bytes_of(token))}


class _ThoughtCounter:
    """Counts the tokens of thoughts, the tags among them."""

    def __init__(self, *, in_thought: bool):
        self._text = ""
        self._tokens = 0
        self._thinking: bool | None = True if in_thought else None  # None: it is not known yet

    def count(self, event: TokenEvent) -> int:
        """Takes a token and returns how many have been thoughts so far."""
        if self._thinking is False:
            return self._tokens
        self._text += event.text
        self._tokens += event.token is not None
        bare = self._text.lstrip()
        if self._thinking is None and not THINK.startswith(bare[: len(THINK)]):
            self._thinking, self._tokens = False, 0
        elif self._thinking is None and bare.startswith(THINK):
            self._thinking = True
        if self._thinking and END_OF_THINK in self._text:
            self._thinking = False
        # What has been looked at is kept as far as a tag may have begun in it.
        self._text = self._text[-len(END_OF_THINK) :] if self._thinking else self._text
        return self._tokens if self._thinking is not None else 0


def _call(call: ToolCall | UnfinishedCall) -> JSON:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments_json},
    }
