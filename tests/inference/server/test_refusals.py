"""Wrong requests: an error of the API's form with the field's name, whatever is wrong, and never a failure."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from qwen35_jax.errors import NonFiniteError
from qwen35_jax.inference.server.sampling_fields import IGNORED
from qwen35_jax.inference.tokenizer import Tokenizer
from tests.inference.server.conftest import MAX_BODY_BYTES
from tests.inference.server.scripted_engine import CONTEXT
from tests.inference.server.test_chat import HELLO, TOOLS, events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PYTHON = re.compile(r"\b(None|True|False|NoneType|dict|list object|sys\.\w+)\b")
"""Words that no client has to know, whatever it is written in."""
USER = {"role": "user", "content": "Hello"}


def refused(response: Any, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and "\n" not in error["message"]
    # What the client wrote may be quoted, whatever it is.
    assert not PYTHON.search(re.sub(r'"(?:[^"\\]|\\.)*"', "", error["message"])), error["message"]
    return error


def body(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    return ({"messages": HELLO} if path == CHAT else {"prompt": "Once"}) | fields


IMAGE = {"role": "user", "content": [{"type": "image_url"}]}
CHOICE = {"type": "function", "function": {"name": "f"}}
JSON = {"type": "json_object"}
TEXT = {"type": "text", "text": "x"}
ANSWER = {"role": "assistant", "content": "x"}


def called(**function: Any) -> dict[str, Any]:
    return ANSWER | {"tool_calls": [{"id": "x", "type": "function", "function": {"name": "f"} | function}]}


def schema(**described: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": described}


def function(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


WRONG_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "missing"),
    ({"messages": []}, "messages", "empty"),
    ({"messages": "Hello"}, "messages", "expected a list"),
    ({"messages": [5]}, "messages[0]", "is 5, expected an object"),
    ({"messages": [USER, USER | {"contents": ""}]}, "messages[1].contents", "did you mean content?"),
    ({"messages": [USER | {"content": 5}]}, "messages[0].content", "is 5"),
    ({"messages": [USER | {"content": [TEXT | {"txt": ""}]}]}, "messages[0].content[0].txt", "mean text?"),
    ({"messages": [USER | {"content": [5]}]}, "messages[0].content[0]", "is 5"),
    ({"messages": [USER | {"tool_calls": [{}]}]}, "messages[0].tool_calls", "of the assistant"),
    ({"messages": [USER, ANSWER | {"refusal": "No."}]}, "messages[1].refusal", "content"),
    ({"messages": [USER, ANSWER | {"audio": {"id": "x"}}]}, "messages[1].audio", "speech"),
    ({"messages": [USER, ANSWER | {"reasoning": "x"}]}, "messages[1].reasoning", "mean reasoning_content?"),
    (
        {"messages": [USER, called(argument="{}")]},
        "messages[1].tool_calls[0].function.argument",
        "arguments?",
    ),
    ({"messages": [USER, called(name=5)]}, "messages[1].tool_calls[0].function.name", "a string"),
    ({"messages": [USER, ANSWER | {"tool_calls": [5]}]}, "messages[1].tool_calls[0]", "is 5"),
    ({"messages": [USER | {"type": "image"}]}, "messages[0].type", "no kind of message"),
    ({"tools": [5]}, "tools[0]", "is 5"),
    ({"tools": [{"function": {"name": "f", "parameter": {}}}]}, "tools[0].function.parameter", "parameters?"),
    ({"tools": [{"name": "f", "x": 1}]}, "tools[0].x", "no field"),
    ({"tools": [{"function": {"name": "f"}, "x": 1}]}, "tools[0].x", "no field"),
    ({"tools": [{"function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict", "true or false"),
    ({"tools": TOOLS, "tool_choice": CHOICE | {"x": 1}}, "tool_choice.x", "no field"),
    ({"messages": [{"role": "king", "content": ""}]}, "messages[0].role", '"king"'),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content", "missing"),
    ({"messages": [IMAGE]}, "messages[0].content[0].type", "text"),
    ({"messages": [USER | {"function_call": {}}]}, "messages[0].function_call", "tool_calls"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages", "No user query"),
    ({"messages": [USER | {"content": "a " * 900}]}, "messages", f"context is {CONTEXT}"),
    ({"temprature": 1}, "temprature", "did you mean temperature?"),
    ({"temperature": -1}, "temperature", "from 0 (greedy) to 2"),
    ({"temperature": "hot"}, "temperature", '"hot"'),
    ({"temperature": True}, "temperature", "is true, expected a number"),
    ({"temperature": 1e308}, "temperature", "is 1e+308, expected a number from 0 (greedy) to 2"),
    ({"seed": 10**4000}, "seed", "000, expected an integer from"),
    ({"n": True}, "n", "is true"),
    ({"stop": [None]}, "stop", "holds null"),
    ({"messages": [called(arguments=[None])]}, "messages[0].tool_calls[0].function.arguments", "is [null]"),
    ({"temperature": 10**400}, "temperature", "expected a number"),
    ({"temperature": 2.5}, "temperature", "to 2"),
    ({"presence_penalty": -3}, "presence_penalty", "from -2 to 2"),
    ({"frequency_penalty": 1e38}, "frequency_penalty", "from -2 to 2"),
    ({"repetition_penalty": 1e-30}, "repetition_penalty", "from 0.01 to 100"),
    ({"logit_bias": {"5": 1e38}}, "logit_bias", "-100 to 100"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_k": 1.5}, "top_k", "expected an integer"),
    ({"top_k": -2}, "top_k", "expected an integer"),
    ({"seed": 1.5}, "seed", "integer"),
    ({"n": 0}, "n", "1 to 128"),
    ({"n": 9}, "n", "takes 8 at once"),
    ({"stop": ["a"] * 5}, "stop", "at most 4"),
    ({"stop": [""]}, "stop", 'holds ""'),
    ({"stop": {"a": 1}}, "stop", "expected a string"),
    ({"logit_bias": {"x": 1}}, "logit_bias", '"x"'),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "0 to 2303"),
    ({"logit_bias": {"5": "much"}}, "logit_bias", "of token 5"),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", "301"),
    ({"max_tokens": 0}, "max_tokens", "1 to"),
    ({"max_tokens": CONTEXT}, "max_tokens", "has room for"),
    ({"max_completion_tokens": 10**30}, "max_completion_tokens", "1 to"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "one of them"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens", "more than the 3"),
    ({"stream": "yes"}, "stream", "true or false"),
    ({"stream_options": {}}, "stream_options", "stream is not true"),
    ({"stream": True, "stream_options": {"include_uses": 1}}, "stream_options.include_uses", "include_usage"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs is not true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
    ({"logprobs": 5}, "logprobs", "true or false"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type", "expected one of function"),
    ({"tools": [{"function": {"name": "f>x\n"}}]}, "tools[0].function.name", "expected 1 to 64 letters"),
    ({"tools": [{"name": "f" * 65}]}, "tools[0].name", "expected 1 to 64 letters"),
    ({"tools": [function({"type": "array"})]}, "tools[0].function.parameters.type", "expected one of object"),
    ({"tools": TOOLS + TOOLS}, "tools[2].function.name", "already"),
    ({"tools": [function(5)]}, "tools[0].function.parameters", "5"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", '"any"'),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function", "missing"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "expected"),
    ({"tool_choice": CHOICE}, "tool_choice", "none of the tools"),
    ({"functions": []}, "functions", "use tools"),
    ({"function_call": "auto"}, "function_call", "tool_choice"),
    ({"modalities": ["audio"]}, "modalities", "text only"),
    ({"reasoning_effort": "maximal"}, "reasoning_effort", "expected one of"),
    ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs.messages", "not for requests"),
    ({"chat_template_kwargs": {"a": []}}, "chat_template_kwargs.a", "expected a string"),
    ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs.enable_thinking", '"no"'),
    (
        {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
        "chat_template_kwargs.enable_thinking",
        'is true, and reasoning_effort is "none"',
    ),
    (
        {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
        "chat_template_kwargs.enable_thinking",
        'is false, and reasoning_effort is "low"',
    ),
    ({"response_format": "json"}, "response_format", "expected an object"),
    ({"response_format": {}}, "response_format.type", "missing"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    ({"response_format": schema(name="x")}, "response_format.json_schema.schema", "missing"),
    ({"response_format": schema(schema={"type": "wood"})}, "response_format.json_schema.schema", "wood"),
    ({"response_format": JSON, "tools": TOOLS}, "response_format", "tool_choice 'none'"),
    ({"response_format": JSON, "ignore_eos": True}, "ignore_eos", "behind the end"),
    ({"response_format": JSON, "min_tokens": 3}, "min_tokens", "behind the end"),
    (
        {
            "tools": [*TOOLS, function({"properties": {"a": {"type": "wood"}}})],
            "tool_choice": "required",
        },
        "tools[2].function.parameters",
        "wood",
    ),
    (
        {
            "tools": [*TOOLS, function({"properties": {"a": {"type": "wood"}}})],
            "tool_choice": CHOICE,
        },
        "tools[2].function.parameters",
        "wood",
    ),
    ({"tools": [*TOOLS, {"name": "a>b"}]}, "tools[2].name", "expected 1 to 64 letters"),
    ({"model": 5}, "model", "expected a string"),
]
WRONG_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "missing"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": {"a": 1}}, "prompt", "expected a string"),
    ({"prompt": ["a", ""]}, "prompt[1]", "empty"),
    ({"prompt": ["a", 5]}, "prompt[1]", "expected a string or a list"),
    ({"prompt": [5, "a"]}, "prompt", '"a"'),
    ({"prompt": [[5], [2304]]}, "prompt[1]", "2303"),
    ({"prompt": [True]}, "prompt", "holds true"),
    ({"prompt": [None, 5]}, "prompt", "holds null"),
    ({"prompt": [-1]}, "prompt", "-1"),
    ({"prompt": ["a"] * 129}, "prompt", "at most 128"),
    ({"prompt": ["a"] * 9}, "n", "9 answers"),
    ({"suffix": "end"}, "suffix", "not done here"),
    ({"echo": True, "logprobs": 1}, "echo", "logprobs"),
    ({"logprobs": True}, "logprobs", "integer"),
    ({"logprobs": 21}, "logprobs", "0 to 20"),
    ({"n": 2, "best_of": 1}, "best_of", "expected n"),
    ({"messages": HELLO}, "messages", "no field"),
    ({"response_format": JSON}, "response_format", "no field"),
]


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [(CHAT, *wrong) for wrong in WRONG_CHATS] + [(COMPLETIONS, *wrong) for wrong in WRONG_COMPLETIONS],
)
def test_a_wrong_field_is_named(client, engine, path, fields, param, words):
    error = refused(client.post(path, json=body(path, fields)))
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert not engine.requests


def test_a_top_p_that_rounds_to_nothing_leaves_the_most_likely_token(client, engine):
    assert client.post(CHAT, json=body(CHAT, {"top_p": 1e-300})).status_code == 200
    assert 0 < np.float32(engine.requests[0].settings.top_p) < 1e-20


def test_a_context_that_is_too_short_has_the_code_that_programs_look_for(client):
    error = refused(client.post(CHAT, json=body(CHAT, {"max_tokens": CONTEXT})))
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "abc " * 4_700}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "<|im_end|>" * 1_800}]}, "messages"),
        (COMPLETIONS, {"prompt": "abc " * 4_700}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", "abc " * 4_700]}, "prompt[1]"),
    ],
)
def test_a_prompt_that_cannot_fit_is_refused_before_it_is_made_into_tokens(
    client, monkeypatch, path, fields, param
):
    made: list[str] = []
    encode = Tokenizer.encode

    def noted(self, text, **options):
        made.append(text)
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    error = refused(client.post(path, json=body(path, fields)))
    assert error["param"] == param and error["code"] == "context_length_exceeded"
    assert "at least" in error["message"]
    assert all(len(text) < 1000 for text in made)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"[1]", "a JSON array"),
        (b"null", "a JSON null"),
        (b'{"messages": NaN}', "NaN"),
        (b'{"temperature": 1e999}', "1e999"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "number of more than 4300 digits"),
        (b'{"a": "\xff"}', "not UTF-8: byte 7 is 0xff"),
        (b'{"a": "\\ud800"}', "half a character"),
        (b'{"\\udfff": 1}', "half a character"),
        (b'{"a": ' * 66 + b"1" + b"}" * 66, "nested more than 64"),
        (b"[" * 19_000, "nested too deeply"),
    ],
)
def test_a_body_that_is_no_request_is_refused(client, content, words):
    error = refused(client.post(CHAT, content=content, headers={"content-type": "application/json"}))
    assert words in error["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_only_json_is_taken_so_that_no_page_of_another_site_can_post(client, kind):
    headers = {} if kind is None else {"content-type": kind}
    content = json.dumps(body(CHAT, {})).encode()
    assert "application/json" in refused(client.post(CHAT, content=content, headers=headers))["message"]


def test_a_body_that_is_too_large_is_refused_whether_it_says_so_or_not(client):
    large = json.dumps(body(CHAT, {"messages": [USER | {"content": "a" * MAX_BODY_BYTES}]})).encode()
    headers = {"content-type": "application/json"}
    pieces = (large[start : start + 1000] for start in range(0, len(large), 1000))
    for content in (large, pieces):
        error = refused(client.post(CHAT, content=content, headers=headers), 413)
        assert str(MAX_BODY_BYTES) in error["message"]


def test_what_is_not_there_or_not_by_this_method_is_told_in_the_same_form(client):
    assert refused(client.get("/v1/nothing"), 404)["code"] == "unknown_url"
    assert refused(client.get(CHAT), 405)["code"] == "method_not_allowed"
    assert client.get(CHAT).headers["allow"] == "POST"
    assert refused(client.post(CHAT, json=body(CHAT, {"model": "gpt"})), 404)["code"] == "model_not_found"
    assert refused(client.get("/v1/models/gpt"), 404)["param"] == "model"


def test_a_full_queue_is_told_with_when_to_come_again_and_nothing_stays_behind(client, engine):
    engine.room, engine.holds = 2, True
    response = client.post(CHAT, json=body(CHAT, {"n": 3}))
    assert refused(response, 429)["code"] == "queue_full"
    assert response.headers["retry-after"] == "1"
    assert len(engine.requests) == 2 and engine.running == 0


@pytest.mark.parametrize(
    ("failure", "status", "words"),
    [
        (NonFiniteError("the logits hold NaN"), 500, "NaN"),
        (RuntimeError("the engine broke while this request was on its way"), 503, "engine broke"),
    ],
)
def test_what_breaks_later_is_told_as_the_status_or_at_the_end_of_the_stream(
    client, engine, failure, status, words
):
    engine.failure = failure
    assert words in refused(client.post(CHAT, json=body(CHAT, {})), status)["message"]
    *pieces, error = events(client, messages=HELLO)
    assert pieces and words in error["error"]["message"] and error["error"]["type"] == "server_error"


def test_health_is_lost_with_the_engine(client, engine):
    assert client.get("/health").status_code == 200
    engine.healthy = False
    assert client.get("/health").status_code == 503


def test_fields_that_change_no_answer_are_taken(client, engine):
    assert client.post(CHAT, json=body(CHAT, dict.fromkeys(IGNORED, "x"))).status_code == 200
    assert engine.requests


SHARED = "model n seed temperature top_p top_k min_p stop logit_bias max_tokens min_tokens stream logprobs"
FIELDS = {
    CHAT: (
        f"{SHARED} stream_options messages tools tool_choice parallel_tool_calls top_logprobs presence_penalty "
        "frequency_penalty "
        "repetition_penalty max_completion_tokens ignore_eos response_format reasoning_effort "
        "chat_template_kwargs"
    ).split(),
    COMPLETIONS: f"{SHARED} prompt best_of echo suffix".split(),
}
NUMBERS = st.one_of(st.integers(-3, 3), st.integers(), st.floats(allow_nan=False, allow_infinity=False))
TEXTS = st.one_of(
    st.text(max_size=5),
    st.sampled_from(
        ["user", "function", "required", "json_object", "<|im_end|>", "</think>", "\x00", "\u2028", "\x1b[2J"]
    ),
)
KEYS = st.one_of(
    st.sampled_from(
        "role content type text function name parameters properties json_schema schema $ref items enable_thinking "
        "tool_calls arguments reasoning_content include_usage strict".split()
    ),
    TEXTS,
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=8,
)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(data=st.data())
def test_whatever_stands_in_a_field_it_is_an_answer_or_a_refusal(
    client: TestClient, path: str, data: st.DataObject
):
    fields = data.draw(st.dictionaries(st.sampled_from(FIELDS[path]), VALUES, max_size=3))
    if path == CHAT and data.draw(st.booleans()):
        message = data.draw(st.dictionaries(KEYS, VALUES, max_size=3))
        fields["messages"] = [*HELLO, {"role": "assistant", "content": "x"} | message, *HELLO]
    if path == CHAT and data.draw(st.booleans()):
        fields["tools"] = [function(data.draw(st.dictionaries(KEYS, VALUES, max_size=3)))]
    response = client.post(path, json=body(path, fields))
    if response.status_code == 200:
        assert '"error"' not in response.text[:10]
    else:
        refused(response, response.status_code)
        assert response.status_code in (400, 404, 413)
