"""A request for an answer in a chat, read field by field into what the engine runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from qwen35_jax.errors import PromptError
from qwen35_jax.inference.chat.messages import MessageError
from qwen35_jax.inference.engine import Request
from qwen35_jax.inference.server.api_error import ApiError, field_error, shown
from qwen35_jax.inference.server.fields import Fields
from qwen35_jax.inference.server.nested_fields import check_message_fields
from qwen35_jax.inference.server.sampling_fields import (
    IGNORED,
    Delivery,
    read_delivery,
    read_max_tokens,
    read_settings,
    refuse_endless,
    seeded,
    with_length,
)
from qwen35_jax.inference.server.served_model import ServedModel
from qwen35_jax.inference.server.tool_choice import read_tool_choice
from qwen35_jax.inference.settings import MOST_LOGPROBS, GenerationSettings

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_TEMPLATE_ARGUMENTS = (
    "self",
    "messages",
    "tools",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
)
_REFUSED = {
    "audio": "asks for speech, and answers are text only here",
    "function_call": "is the API's old form: use tool_choice",
    "functions": "is the API's old form: use tools",
    "modalities": "asks for more than text, and answers are text only here",
    "moderation": "is not done here",
    "verbosity": "is not known to these models: ask for it in words",
    "web_search_options": "asks for a search, which is not done here: declare a tool for it",
}
_ASKS_FOR_NOTHING = (["text"], "medium")


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """What a chat asks for.

    Attributes:
        requests: one per choice.
        delivery: how the answer reaches the client.
        in_thought: whether the answer begins inside the thoughts.
        tools: whose calls are looked for in the answer.
        one_call: the first call ends the answer.
        must_call: the answer is calls and nothing else, thoughts aside.
        top_logprobs: see `GenerationSettings`.
    """

    requests: tuple[Request, ...]
    delivery: Delivery
    in_thought: bool
    tools: tuple[Mapping[str, Any], ...]
    one_call: bool
    must_call: bool
    top_logprobs: int | None


def read_chat_request(content: Mapping[str, Any], served: ServedModel, context: int) -> ChatRequest:
    """Reads and checks a request, and makes its prompt.

    Args:
        content: the body.
        served: the model.
        context: tokens that a prompt and its answer have together.

    Raises:
        ApiError: a field cannot be taken.
        MessageError: the same, of a message or a tool.
    """
    if served.chat_prompts is None:
        raise ApiError(f"{served.name} has no chat template: use /v1/completions", param="messages")
    fields = Fields(content)
    fields.value("model")  # looked at by whoever found the model
    messages = _messages(fields)
    choice = read_tool_choice(fields)
    delivery = read_delivery(fields)
    most = read_max_tokens(fields)
    top_logprobs = _top_logprobs(fields)
    settings = dataclasses.replace(
        read_settings(fields, served.defaults, served.config.vocab_size), top_logprobs=top_logprobs
    )
    response_format = fields.inner("response_format")
    variables = _template_variables(fields)
    fields.refuse(_REFUSED, harmless=_ASKS_FOR_NOTHING)
    fields.refuse_unread(ignored=IGNORED)
    try:
        prompt = served.chat_prompts.encode(
            messages,
            choice.tools,
            variables,
            check=lambda text: refuse_endless("messages", served.token_texts.fewest_for(text), context),
        )
    except MessageError:
        raise
    except PromptError as error:
        raise ApiError(str(error), param="messages", code="invalid_value") from error
    settings = with_length(
        settings,
        prompt="messages",
        prompt_length=len(prompt.tokens),
        context=context,
        most=most,
        default=None,
    )
    stop_ids = () if settings.ignore_eos else served.chat_stop_ids
    make_constraint = served.grammars.constraints(response_format, choice, in_thought=prompt.in_thought)
    requests = [
        Request(tuple(prompt.tokens), seeded(settings, index), stop_ids, make_constraint())
        for index in range(delivery.choices)
    ]
    if requests[0].constraint is not None:
        _refuse_beside_grammar(settings)
    one_call = bool(choice.tools) and not choice.parallel
    return ChatRequest(
        requests=tuple(requests),
        delivery=delivery,
        in_thought=prompt.in_thought,
        tools=choice.tools,
        one_call=one_call,
        must_call=choice.mode == "required",
        top_logprobs=top_logprobs,
    )


def _messages(fields: Fields) -> Sequence[Mapping[str, Any]]:
    messages = fields.items("messages")
    if messages is None:
        raise field_error("messages", "is missing", code="missing_required_parameter")
    if not messages:
        raise field_error("messages", "is empty, expected at least one message")
    check_message_fields(messages)
    return messages


def _top_logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, MOST_LOGPROBS)
    if top and not wanted:
        raise field_error("top_logprobs", "is given, and logprobs is not true")
    return (top or 0) if wanted else None


def _template_variables(fields: Fields) -> dict[str, Any]:
    """What the template reads beside messages and tools."""
    variables = {}
    effort = fields.choice("reasoning_effort", EFFORTS)
    thinks = None if effort is None else effort != "none"
    for name, value in (fields.mapping("chat_template_kwargs") or {}).items():
        field = f"chat_template_kwargs.{name}"
        if name in _TEMPLATE_ARGUMENTS:
            raise field_error(field, "is not for requests to set")
        if isinstance(value, dict | list):
            raise field_error(field, f"is {shown(value)}, expected a string, a number, true or false")
        variables[name] = value
    thinking = variables.get("enable_thinking")
    if thinking is not None and not isinstance(thinking, bool):
        raise field_error(
            "chat_template_kwargs.enable_thinking", f"is {shown(thinking)}, expected true or false"
        )
    if thinks is not None and thinking not in (None, thinks):
        raise field_error(
            "chat_template_kwargs.enable_thinking",
            f"is {shown(thinking)}, and reasoning_effort is {shown(effort)}: leave one of them out",
        )
    return variables if thinks is None else variables | {"enable_thinking": thinks}


def _refuse_beside_grammar(settings: GenerationSettings) -> None:
    """A grammar has an end, and behind it there is nothing that could be drawn."""
    for field, asks in (("ignore_eos", settings.ignore_eos), ("min_tokens", settings.min_new_tokens > 0)):
        if asks:
            raise field_error(field, "asks to go on behind the end that response_format or tool_choice sets")
