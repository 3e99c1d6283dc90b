"""Chats over HTTP, with an engine that says what the test wants: what the API makes of an answer."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from openai.types.chat import ChatCompletionMessage, ParsedChatCompletionMessage
from starlette.testclient import TestClient

from qwen35_jax.inference.grammars.compiler import GrammarCompiler
from qwen35_jax.inference.server.api_error import ApiError
from tests.inference.server.scripted_engine import CONTEXT

HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "trains")
]
CALL = (
    "<tool_call>\n<function={}>\n<parameter=city>\n{}\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
TWO_CALLS = "I look.\n\n" + CALL.format("weather", "Rome") + "\n" + CALL.format("trains", "Oslo")


def post(client: TestClient, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/chat/completions", json={"messages": HELLO} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def events(client: TestClient, path: str = "/v1/chat/completions", **fields: Any) -> list[dict[str, Any]]:
    """The objects of a stream, which ends as streams do."""
    response = client.post(path, json={"stream": True} | fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *pieces, end, nothing = response.text.split("\n\n")
    assert (end, nothing) == ("data: [DONE]", "")
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces]


def streamed(client: TestClient, index: int = 0, **fields: Any) -> dict[str, Any]:
    """One choice of a stream, put together again as clients do it."""
    choice: dict[str, Any] = {"message": {"content": ""}, "logprobs": None, "finish_reason": None}
    for event in events(client, **{"messages": HELLO} | fields):
        for piece in event["choices"]:
            if piece["index"] != index:
                continue
            assert choice["finish_reason"] is None
            choice["finish_reason"] = piece["finish_reason"]
            if piece["logprobs"] is not None:
                choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
                choice["logprobs"]["content"] += piece["logprobs"]["content"]
            message, delta = choice["message"], piece["delta"]
            message.update(role=delta.get("role", message.get("role")))
            for key in ("content", "reasoning_content"):
                if key in delta:
                    message[key] = message.get(key, "") + delta[key]
            for call in delta.get("tool_calls", []):
                calls = message.setdefault("tool_calls", [])
                assert call.pop("index") == len(calls)
                calls.append(call)
    return choice


def calls_of(message: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    calls = message.get("tool_calls", [])
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def test_a_reply_has_the_form_of_the_api(client):
    reply = post(client, model="nano")
    assert reply["object"] == "chat.completion" and reply["model"] == "nano"
    assert reply["id"].startswith("chatcmpl-") and isinstance(reply["created"], int)
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "A bird is an animal.", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]


def test_usage_counts_prompt_answer_thoughts_and_what_was_remembered(client, engine, served):
    thought, rest = "<think>\nI see a bird.\n</think>", "\n\nYes."
    engine.answer = thought + rest
    usage = post(client)["usage"]
    prompt = len(engine.requests[0].prompt)
    answer = len(served.tokenizer.encode(engine.answer)) + 1  # and the stop id
    assert usage == {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": len(served.tokenizer.encode(thought))},
    }


@pytest.mark.parametrize(
    ("thinking", "answer", "reasoning", "content"),
    [
        (True, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (True, "Hm. I never", "Hm. I never", ""),
        (False, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (False, "Yes.", None, "Yes."),
    ],
)
def test_thoughts_are_told_apart_from_content(client, engine, thinking, answer, reasoning, content):
    engine.answer = answer
    fields = {"chat_template_kwargs": {"enable_thinking": thinking}}
    whole, pieces = post(client, **fields)["choices"][0], streamed(client, **fields)
    for choice in (whole, pieces):
        assert choice["message"].get("reasoning_content") == reasoning
        assert choice["message"]["content"] == content
    thoughts = post(client, **fields)["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert (thoughts > 0) == (reasoning is not None)


@pytest.mark.parametrize(
    ("effort", "thinks"), [("none", False), ("low", True), ("high", True), (None, False)]
)
def test_reasoning_effort_turns_thinking_on_and_off(client, engine, served, effort, thinks):
    post(
        client, reasoning_effort=effort, chat_template_kwargs={"enable_thinking": thinks if effort else None}
    )
    text = served.tokenizer.decode(engine.requests[0].prompt)
    assert text.endswith("<think>\n") == thinks


def test_a_grammar_is_compiled_once_for_all_choices_and_each_walks_alone(client, engine, served, monkeypatch):
    compiled: list[Any] = []
    compile_schema = GrammarCompiler.json_schema

    def noted(self, schema):
        compiled.append(schema)
        return compile_schema(self, schema)

    monkeypatch.setattr(GrammarCompiler, "json_schema", noted)
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    post(client, n=3, response_format=asked)
    assert compiled == [SCHEMA]
    first, second, third = (request.constraint for request in engine.requests)
    before = second.allowed()
    first.accept(served.tokenizer.encode("{")[0])
    assert not np.array_equal(first.allowed(), before)
    assert np.array_equal(third.allowed(), before)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "response_format.json_schema.schema",
        ),
        ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
        ({"tools": TOOLS[1:], "tool_choice": "required"}, "tools[0].function.parameters"),
    ],
)
def test_a_grammar_that_breaks_on_the_way_is_told_by_its_field(client, engine, served, fields, param):
    post(client, **fields)
    with pytest.raises(ApiError, match="does not go on") as caught:
        engine.requests[0].constraint.accept(served.tokenizer.encode("x")[0])
    assert caught.value.param == param


@pytest.mark.parametrize("stream", [False, True])
def test_b88_tool_calls_come_with_ids_and_typed_arguments(client, engine, stream):
    engine.answer = TWO_CALLS
    choice = streamed(client, tools=TOOLS) if stream else post(client, tools=TOOLS)["choices"][0]
    assert calls_of(choice["message"]) == [
        ("weather", {"city": "Rome", "days": 2}),
        ("trains", {"city": "Oslo", "days": 2}),
    ]
    assert choice["message"]["content"] == "I look."
    assert choice["finish_reason"] == "tool_calls"


def test_an_answer_of_calls_alone_has_no_content(client, engine):
    engine.answer = CALL.format("weather", "Rome")
    assert post(client, tools=TOOLS)["choices"][0]["message"]["content"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_the_first_one_ends_the_answer(client, engine, stream):
    engine.answer, engine.holds = f"{TWO_CALLS}\n\nThat was it.", True
    fields = {"tools": TOOLS, "parallel_tool_calls": False}
    choice = streamed(client, **fields) if stream else post(client, **fields)["choices"][0]
    assert calls_of(choice["message"]) == [("weather", {"city": "Rome", "days": 2})]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I look.", "tool_calls")
    assert engine.running == 0


@pytest.mark.parametrize("stream", [False, True])
def test_with_tool_choice_none_the_model_hears_of_no_tools_and_a_call_is_text(client, engine, served, stream):
    engine.answer = CALL.format("weather", "Rome")
    fields = {"tools": TOOLS, "tool_choice": "none"}
    choice = streamed(client, **fields) if stream else post(client, **fields)["choices"][0]
    assert choice["message"]["content"] == engine.answer and choice["finish_reason"] == "stop"
    assert "weather" not in served.tokenizer.decode(engine.requests[0].prompt)


def test_a_tool_that_is_named_is_the_only_one_that_the_model_hears_of(client, engine, served):
    engine.answer = CALL.format("trains", "Oslo")
    choice = {"type": "function", "function": {"name": "trains"}}
    reply = post(client, tools=TOOLS, tool_choice=choice)["choices"][0]
    assert calls_of(reply["message"]) == [("trains", {"city": "Oslo", "days": 2})]
    prompt = served.tokenizer.decode(engine.requests[0].prompt)
    assert '"trains"' in prompt and '"weather"' not in prompt


@pytest.mark.parametrize(
    ("fields", "begins", "never_begins"),
    [
        ({"response_format": {"type": "json_object"}}, "{", "A"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "{",
            "[",
        ),
        ({"tools": TOOLS, "tool_choice": "required"}, "<tool_call>", "A"),
        (
            {"tools": TOOLS, "tool_choice": "required", "chat_template_kwargs": {"enable_thinking": True}},
            "A",
            "<|im_end|>",
        ),
    ],
)
def test_formats_and_required_calls_constrain_every_choice(
    client, engine, served, fields, begins, never_begins
):
    post(client, n=2, **fields)
    constraints = [request.constraint for request in engine.requests]
    assert len({id(constraint) for constraint in constraints}) == 2
    for constraint in constraints:
        bits = constraint.allowed()
        allowed = [bool(bits[token // 32] >> token % 32 & 1) for token in range(served.config.vocab_size)]
        first, other = (served.tokenizer.encode(text)[0] for text in (begins, never_begins))
        assert allowed[first] and not allowed[other]


@pytest.mark.parametrize("format", [None, {"type": "text"}])
def test_text_is_not_constrained(client, engine, format):
    post(client, response_format=format)
    assert engine.requests[0].constraint is None


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_tell_every_token_but_the_one_that_ends_the_answer(client, engine, served, stream):
    engine.answer = "Oslo é"
    fields = {"logprobs": True, "top_logprobs": 2}
    choice = streamed(client, **fields) if stream else post(client, **fields)["choices"][0]
    told = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in told).decode() == "Oslo é"
    assert len(told) == len(served.tokenizer.encode("Oslo é"))
    for entry in told:
        assert entry["token"] == bytes(entry["bytes"]).decode(errors="replace")
        assert entry["logprob"] == -0.5
        assert [other["logprob"] for other in entry["top_logprobs"]] == [-0.5, -1.25]
        assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]


def test_logprobs_without_top_ones_tell_only_what_was_drawn(client):
    told = post(client, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert told and all(entry["top_logprobs"] == [] for entry in told)


def test_several_choices_draw_with_seeds_that_follow_each_other(client, engine):
    reply = post(client, n=3, seed=-1)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert [request.settings.seed for request in engine.requests] == [2**32 - 1, 0, 1]
    assert reply["usage"]["prompt_tokens"] == len(engine.requests[0].prompt)
    assert streamed(client, index=2, n=3)["message"]["content"] == "A bird is an animal."


def test_settings_reach_the_engine_by_the_names_of_the_api(client, engine, served):
    fields = {
        "temperature": 0.5, "top_p": 0.75, "top_k": 7, "min_p": 0.25, "presence_penalty": 0.5,
        "frequency_penalty": -0.25, "repetition_penalty": 1.25, "logit_bias": {"5": -100, "6": 1.5},
        "max_completion_tokens": 9, "min_tokens": 3, "stop": ["x", "yz"], "seed": 8,
    }  # fmt: skip
    post(client, **fields)
    settings = engine.requests[0].settings
    for name, value in fields.items():
        if name in ("temperature", "top_p", "top_k", "min_p", "seed") or name.endswith("penalty"):
            assert getattr(settings, name) == value, name
    assert settings.logit_bias == {5: -100, 6: 1.5}
    assert (settings.max_new_tokens, settings.min_new_tokens) == (9, 3)
    assert settings.stop == ("x", "yz")
    assert engine.requests[0].stop_ids == served.chat_stop_ids


def test_what_is_not_given_is_as_the_checkpoint_recommends_and_as_long_as_the_context_allows(client, engine):
    post(client, top_k=-1, stop="x", temperature=None, user="someone", store=True, metadata={"a": "b"})
    settings = engine.requests[0].settings
    assert (settings.temperature, settings.top_k, settings.stop) == (0.0, 0, ("x",))
    assert settings.max_new_tokens == CONTEXT - len(engine.requests[0].prompt)


def test_a_stop_string_ends_the_text(client, engine):
    choice = post(client, stop=" an")["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("A bird is", "stop")


def test_an_answer_that_is_cut_off_says_so(client, engine):
    engine.answer = TWO_CALLS
    choice = post(client, max_tokens=5, tools=TOOLS)["choices"][0]
    assert choice["finish_reason"] == "length"


def test_a_stream_begins_with_the_role_and_ends_with_the_reason_and_the_usage(client):
    whole = post(client)
    pieces = events(client, messages=HELLO, stream_options={"include_usage": True})
    assert pieces[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert pieces[-2]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert pieces[-1]["choices"] == [] and pieces[-1]["usage"] == whole["usage"]
    assert all(piece["usage"] is None for piece in pieces[:-1])
    assert {piece["object"] for piece in pieces} == {"chat.completion.chunk"}
    assert len({(piece["id"], piece["created"], piece["model"]) for piece in pieces}) == 1
    assert all("usage" not in piece for piece in events(client, messages=HELLO))


def test_b87_calls_and_their_results_can_be_sent_back_as_they_came(client, engine, served):
    engine.answer = CALL.format("weather", "Rome")
    message = post(client, tools=TOOLS)["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Rain."}
    post(client, messages=[*HELLO, message, result], tools=TOOLS)
    prompt = served.tokenizer.decode(engine.requests[1].prompt)
    assert "<parameter=city>\nRome\n</parameter>" in prompt and "<tool_response>\nRain." in prompt


@pytest.mark.parametrize("exclude_unset", [False, True])
@pytest.mark.parametrize("message", [ChatCompletionMessage, ParsedChatCompletionMessage])
def test_an_answer_can_be_sent_back_as_the_client_writes_it_down(
    client, engine, served, message, exclude_unset
):
    engine.answer = "Hm.\n</think>\n\n" + TWO_CALLS
    thinking = {"tools": TOOLS, "chat_template_kwargs": {"enable_thinking": True}}
    answer = message.model_validate(post(client, **thinking)["choices"][0]["message"])
    sent = answer.model_dump(exclude_unset=exclude_unset)
    assert sent["reasoning_content"] == "Hm." and sent["refusal"] is None
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "4"} for call in sent["tool_calls"]]
    post(client, messages=[*HELLO, sent, *results], **thinking)
    prompt = served.tokenizer.decode(engine.requests[1].prompt)
    assert "<parameter=city>\nOslo\n</parameter>" in prompt and "Hm.\n</think>" in prompt


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "x", "name": "someone", "type": "text"},
        {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "x", "tool_calls": None, "refusal": None, "anything": None},
        {
            "role": "assistant",
            "content": "x",
            "annotations": [{"type": "url_citation"}],
            "function_call": None,
        },
        {"role": "assistant", "content": "x", "tool_calls": [{"index": 0, "name": "f", "arguments": {}}]},
    ],
)
def test_what_clients_write_into_messages_beside_their_text_is_taken(client, message):
    post(client, messages=[*HELLO, message, *HELLO])


def test_half_a_character_in_a_call_is_sent_as_json_has_it(client, engine):
    schema = {"type": "object", "properties": {"x": {"type": "array"}}}
    engine.answer = CALL.format("f", "1").replace("city", "x").replace("\n1\n", '\n["\\ud800"]\n')
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    call = post(client, tools=tools)["choices"][0]["message"]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"])["x"] == ["\ud800"]
