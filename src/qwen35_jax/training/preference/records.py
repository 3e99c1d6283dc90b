"""Lines of a JSONL file of preferences: a prompt, the answer to it that was chosen, and one that was rejected.

    {"prompt": "...", "chosen": "...", "rejected": "..."}
    {"prompt": [messages], "chosen": [messages], "rejected": [messages], "tools": [...]}
    {"chosen": [messages], "rejected": [messages]}
    {"chosen": "...", "rejected": "..."}

Three texts are encoded as they are, without a chat template. Where one of the three is a list of messages, all are
parts of a chat: a prompt that is a text is a message of the user, and such an answer one of the assistant. Without a
prompt the answers are whole conversations or texts, and what both share at their beginning is the prompt. Answers that
begin with a message of the user or the system are whole as well, and a prompt beside them is not looked at, since it
tells again what they begin with.

Other fields are not looked at. These are the forms that TRL reads, and those of the data sets on the Hub.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from qwen35_jax.inference.chat.messages import MessageError, checked_messages, checked_tools
from qwen35_jax.training.records import Chat, Completion, DataError, Record, Text, no_form, read_lines

FORMS = "chosen and rejected, and mostly prompt"

Messages = list[dict[str, Any]]


class Comparison(NamedTuple):
    """Two answers to the same prompt.

    Attributes:
        chosen: the better one, behind its prompt.
        rejected: the other, of the same form.
        shared: messages with which both begin and which are the prompt; 0 where they are not chats.
    """

    chosen: Chat | Completion | Text
    rejected: Chat | Completion | Text
    shared: int = 0


def read_comparisons(path: str | os.PathLike[str]) -> list[Record[Comparison]]:
    """All records of a JSONL file, in order.

    Raises:
        DataError: the file cannot be read or holds no record, or a line is not UTF-8, no JSON object, of none of the
            forms, or malformed in a field; names the line.
    """
    return read_lines(path, _content, FORMS)


def _content(place: str, content: dict[str, Any]) -> Comparison:
    prompt, chosen, rejected = (content.get(name) for name in ("prompt", "chosen", "rejected"))
    if chosen is None or rejected is None:
        raise no_form(place, content, FORMS)
    if isinstance(chosen, str) and isinstance(rejected, str) and (prompt is None or isinstance(prompt, str)):
        if prompt is None:
            return Comparison(Text(chosen), Text(rejected))
        return Comparison(Completion(prompt, chosen), Completion(prompt, rejected))
    try:
        asked = None if prompt is None else _messages("prompt", prompt, role="user")
        answers = [_messages("chosen", chosen), _messages("rejected", rejected)]
        tools = checked_tools(content["tools"]) if content.get("tools") else None
    except MessageError as error:
        raise DataError(f"{place}: {error}") from error
    whole = [answer[0]["role"] in ("system", "user") for answer in answers]
    if whole[0] != whole[1]:
        raise DataError(
            f"{place}: chosen begins with a message of the {answers[0][0]['role']} and rejected with one of the "
            f"{answers[1][0]['role']}, expected two answers or two whole conversations"
        )
    if whole[0]:
        shared = _shared(*answers)
        for name, answer in zip(("chosen", "rejected"), answers, strict=True):
            if shared < len(answer) and answer[shared]["role"] != "assistant":
                raise DataError(
                    f"{place}: chosen and rejected differ in {name}[{shared}], which is not the assistant's, expected "
                    "answers to the same prompt"
                )
    elif asked is None:
        raise DataError(
            f"{place}: chosen begins with a message of the {answers[0][0]['role']}, and there is no prompt: expected "
            "one, or whole conversations"
        )
    elif asked[-1]["role"] == "assistant":
        raise DataError(
            f"{place}: prompt ends with a message of the assistant, expected one that asks for an answer"
        )
    else:
        shared = len(asked)
        answers = [asked + answer for answer in answers]
    chosen, rejected = (Chat(answer, tools) for answer in answers)
    return Comparison(chosen, rejected, shared)


def _messages(field: str, value: Any, *, role: str = "assistant") -> Messages:
    """Messages of a field; a text is one of a role."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    try:
        messages = checked_messages(value)
    except MessageError as error:
        complaint = str(error).removeprefix(error.field).strip()
        raise MessageError(field + error.field.removeprefix("messages"), complaint) from error
    if not messages:
        raise MessageError(field, "is empty, expected messages")
    return messages


def _shared(left: Messages, right: Messages) -> int:
    """Messages with which both begin."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
