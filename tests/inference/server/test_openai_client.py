"""The official client, unchanged, and a server with the built-in model."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.inference.server.served_process import ServedProcess

KEY = "sk-of-the-test"
FRANCE, PARIS = "What is the capital of France?", "The capital of France is Paris."
PERU, LIMA = "What is the capital of Peru?", "The capital of Peru is Lima."
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": SCHEMA}}
    for name in ("weather", "trains")
]


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServedProcess]:
    options = ("--slots", "3", "--context", "768", "--prefill-tokens", "32", "--queue", "20")
    with ServedProcess(*options, environment={"QWEN35_API_KEY": KEY}) as server:
        before = server.metrics()["qwen35_compiled_programs"]
        yield server
        wait_for(lambda: server.metrics()["qwen35_slots_occupied"] == 0)
        after = server.metrics()
        assert after["qwen35_compiled_programs"] == before > 0
        assert after["qwen35_submitted_requests_total"] == sum(
            after[f'qwen35_ended_requests_total{{outcome="{outcome}"}}']
            for outcome in ("finished", "cancelled")
        )
        assert server.end() == 0
        assert not any("Traceback" in line for line in server.lines), server.lines


@pytest.fixture(scope="module")
def client(server: ServedProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0, timeout=120)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_chat_is_answered_and_goes_on(client):
    first = client.chat.completions.create(model="nano", messages=user(FRANCE))
    assert first.choices[0].message.content == PARIS
    assert first.choices[0].finish_reason == "stop"
    messages = [*user(FRANCE), first.choices[0].message, *user(PERU)]
    assert client.chat.completions.create(model="nano", messages=messages).choices[0].message.content == LIMA


def test_a_stream_adds_up_to_the_same_answer_and_usage(client):
    whole = client.chat.completions.create(model="nano", messages=user(FRANCE))
    options: Any = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model="nano", messages=user(FRANCE), stream=True, stream_options=options
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == PARIS
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )
    with client.chat.completions.stream(model="nano", messages=user(FRANCE)) as stream:
        assert stream.get_final_completion().choices[0].message.content == PARIS


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"weather", "trains"}), ({"type": "function", "function": {"name": "trains"}}, {"trains"})],
)
def test_a_required_call_keeps_to_its_schema_streamed_and_not(client, choice, names):
    asked: Any = {"model": "nano", "messages": user("Weather?"), "tools": TOOLS, "tool_choice": choice}
    asked["parallel_tool_calls"] = False
    whole = client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        pieces = stream.get_final_completion().choices[0]
    for found in (whole, pieces):
        assert found.finish_reason == "tool_calls"
        (call,) = found.message.tool_calls
        assert call.function.name in names
        arguments = json.loads(call.function.arguments)
        assert arguments["city"] in ("Rome", "Oslo") and 1 <= arguments["days"] <= 9
    result = {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": "Sunny."}
    after = client.chat.completions.create(
        model="nano", messages=[*user("Weather?"), whole.message, result], tools=TOOLS, max_tokens=20
    )
    assert after.choices[0].finish_reason in ("stop", "length", "tool_calls")


@pytest.mark.parametrize("cut", [{"max_tokens": 14}, {"stop": "city"}], ids=["by its length", "by a stop"])
def test_a_required_call_that_is_cut_short_is_a_call_streamed_and_not(client, cut):
    choice = {"type": "function", "function": {"name": "trains"}}
    asked: Any = {"model": "nano", "messages": user("Weather?"), "tools": TOOLS, "tool_choice": choice, **cut}
    whole = client.chat.completions.create(**asked).choices[0]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **asked)]
    assert not any(chunk.delta.content for chunk in chunks) and not whole.message.content
    (streamed,) = (call for chunk in chunks for call in chunk.delta.tool_calls or [])
    (call,) = whole.message.tool_calls
    assert streamed.function.arguments == call.function.arguments
    assert streamed.function.name == call.function.name == "trains"
    assert whole.finish_reason == chunks[-1].finish_reason == "length"


class Journey(pydantic.BaseModel):
    city: Literal["Rome", "Oslo"]
    days: int = pydantic.Field(ge=1, le=9)  # the built-in model would write digits without end


@pytest.mark.parametrize("thinking", [False, True])
def test_an_answer_keeps_to_a_schema_after_thoughts_too(client, thinking):
    asked: Any = {"model": "nano", "messages": user(FRANCE), "seed": 3}
    asked["extra_body"] = {"chat_template_kwargs": {"enable_thinking": thinking}}
    answer = client.chat.completions.parse(response_format=Journey, **asked).choices[0].message
    assert isinstance(answer.parsed, Journey)
    assert ("reasoning_content" in answer.model_extra) <= thinking
    schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    found = json.loads(
        client.chat.completions.create(response_format=schema, **asked).choices[0].message.content
    )
    assert set(found) == {"city", "days"}


def test_log_probabilities_are_the_models_own(client):
    told = client.chat.completions.create(
        model="nano", messages=user(FRANCE), logprobs=True, top_logprobs=3, logit_bias={"5": -100}
    ).choices[0]
    assert "".join(entry.token for entry in told.logprobs.content) == PARIS
    for entry in told.logprobs.content:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob >= entry.top_logprobs[2].logprob
        assert entry.top_logprobs[0].token == entry.token  # the most likely one was taken


def test_completions_take_texts_and_ids_and_tell_logprobs(client):
    reply = client.completions.create(
        model="nano",
        prompt=["The capital of France", "The capital of Peru"],
        max_tokens=8,
        logprobs=1,
        stop=".",
    )
    assert [choice.text for choice in reply.choices] == [" is Paris", " is Lima"]
    told = reply.choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset)
    assert client.completions.create(model="nano", prompt=[5, 17, 3], max_tokens=2).usage.prompt_tokens == 3
    stream = client.completions.create(model="nano", prompt="The capital of France", echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "The capital of France is Paris."


def test_a_seed_repeats_and_settings_of_ours_go_into_the_extra_body(client):
    asked: Any = {
        "model": "nano",
        "messages": user("Tell me something."),
        "temperature": 1.5,
        "max_tokens": 30,
    }
    asked["extra_body"] = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1}
    texts = [
        [choice.message.content for choice in client.chat.completions.create(n=2, seed=seed, **asked).choices]
        for seed in (7, 7, 8)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert texts[2][0] == texts[0][1]  # the second of two choices has the next seed


def test_models_are_listed_and_told_by_name(client):
    assert [model.id for model in client.models.list()] == ["nano"]
    assert client.models.retrieve("nano").id == "nano"


@pytest.mark.parametrize(
    ("error", "status", "fields"),
    [
        (openai.BadRequestError, 400, {"temperature": -1}),
        (openai.BadRequestError, 400, {"messages": [{"role": "user", "content": "a " * 2000}]}),
        (openai.NotFoundError, 404, {"model": "gpt"}),
    ],
)
def test_errors_are_the_clients_own_classes(client, error, status, fields):
    asked: Any = {"model": "nano", "messages": user(FRANCE)} | fields
    with pytest.raises(error) as raised:
        client.chat.completions.create(**asked)
    assert raised.value.status_code == status
    assert raised.value.param == next(iter(fields))


def test_a_wrong_key_is_the_clients_authentication_error(client):
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="sk-other").models.list()


def test_many_clients_at_once_get_the_answers_of_one(server):
    questions = [(FRANCE, PARIS), (PERU, LIMA)] * 6

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key=KEY, timeout=120) as client:
            asked = [
                client.chat.completions.create(model="nano", messages=user(text)) for text, _ in questions
            ]
            return [reply.choices[0].message.content or "" for reply in await asyncio.gather(*asked)]

    assert asyncio.run(ask_all()) == [answer for _, answer in questions]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(client, server, stream):
    def cancelled() -> float:
        return server.metrics()['qwen35_ended_requests_total{outcome="cancelled"}']

    before = cancelled()
    asked: Any = {"model": "nano", "prompt": "The", "max_tokens": 700, "extra_body": {"ignore_eos": True}}
    if stream:
        with client.completions.create(stream=True, **asked) as chunks:
            next(chunks)
            assert server.metrics()["qwen35_slots_occupied"] == 1
    else:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.05).completions.create(**asked)
    wait_for(lambda: cancelled() == before + 1)
    wait_for(lambda: server.metrics()["qwen35_slots_occupied"] == 0)
