"""A conversation as token ids, in which special tokens stand only where the template wrote them.

A rendered conversation is one text, and in a text the name of a special token is that token: a user who writes
`<|im_end|>\\n<|im_start|>system` would end their turn and speak for the operator. So names in what a client sends are
marked before the template sees them, by a character of Unicode that stands for nothing, and what is marked is read as
the characters that it consists of. A conversation without such names is encoded as everywhere else.

That holds for all tokens that the tokenizer adds to its vocabulary, `</think>` and `<tool_response>` among them, and
for all roles: a message is text, whoever it is from. The one exception are thoughts that stand in the content of an
earlier answer, which some clients send back that way; they are taken for `reasoning_content`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers

from qwen35_jax.inference.chat.answer_parser import END_OF_THINK, opens_thought, parse_answer
from qwen35_jax.inference.chat.marks import map_texts, texts, unused_marks, without_mark
from qwen35_jax.inference.chat.messages import checked_messages, checked_tools
from qwen35_jax.inference.chat_template import ChatTemplate
from qwen35_jax.inference.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class ChatPrompt:
    """A conversation, ready to be continued.

    Attributes:
        tokens: ids.
        in_thought: whether the answer begins inside the thoughts, see `opens_thought`.
    """

    tokens: list[int]
    in_thought: bool


class ChatPrompts:
    """Makes prompts of conversations that come from people who are not trusted.

    Args:
        template: of the model.
        tokenizer: of the model. Making this object takes as long as reading the tokenizer did.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer):
        self._template = template
        self._tokenizer = tokenizer
        self._added = {
            token.content: id
            for id, token in tokenizer.backend.get_added_tokens_decoder().items()
            if len(token.content) > 1
        }
        names = "|".join(re.escape(name) for name in sorted(self._added, key=len, reverse=True)) or r"(?!)"
        self._name = re.compile(f"({names})")
        self._start_of_name = re.compile(f"(?=(?:{names})).", re.DOTALL)
        self._literal = _without_added_tokens(tokenizer.backend)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        check: Callable[[str], None] = lambda text: None,
    ) -> ChatPrompt:
        """Renders and encodes a conversation, up to the opening of the next answer.

        Args:
            messages: see `checked_messages`.
            tools: see `checked_tools`.
            variables: what else the template reads, `enable_thinking` among them.
            check: is shown the rendered text before it is made into tokens, and may refuse it.

        Raises:
            MessageError: a message or a tool is malformed.
            PromptError: the template refuses the conversation.
        """
        messages = [_with_thoughts_apart(message) for message in checked_messages(messages)]
        tools = checked_tools(tools) if tools else None
        sent = messages, tools, dict(variables)
        if not any(self._name.search(text) for text in texts(sent)):
            text = self._render(*sent)
            check(text)
            tokens = self._tokenizer.encode(text, add_special_tokens=False)
            return ChatPrompt(tokens, opens_thought(text))
        (mark,) = unused_marks(sent, 1)
        text = self._render(*map_texts(lambda text: self._start_of_name.sub(rf"\g<0>{mark}", text), sent))
        check(without_mark(text, mark))
        return ChatPrompt(self._encode_marked(text, mark), opens_thought(text))

    def _render(self, messages: Any, tools: Any, variables: dict[str, Any]) -> str:
        return self._template.render(messages, tools=tools, **variables)

    def _encode_marked(self, text: str, mark: str) -> list[int]:
        tokens: list[int] = []
        for piece in self._name.split(text):
            if piece in self._added:
                tokens.append(self._added[piece])
                continue
            tokens += self._literal.encode(without_mark(piece, mark), add_special_tokens=False).ids
        return tokens


def _without_added_tokens(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A copy that reads every text as characters.

    `encode_special_tokens` of the library is not enough: it leaves out tokens such as `</think>`, which the family adds
    without calling them special.
    """
    content = json.loads(backend.to_str())
    content["added_tokens"] = []
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def _with_thoughts_apart(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if message["role"] != "assistant" or message.get("reasoning_content") or END_OF_THINK not in content:
        return message
    parts = parse_answer(content, in_thought=True)
    return message | {"content": parts.content, "reasoning_content": parts.reasoning}
