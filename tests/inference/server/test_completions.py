"""Completions over HTTP, with an engine that says what the test wants."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.inference.server.test_chat import events

PROMPT = "Once upon"


def post(client: TestClient, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json={"prompt": PROMPT} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_reply_has_the_form_of_the_api(client, engine, served):
    reply = post(client, model="nano")
    assert reply["object"] == "text_completion" and reply["id"].startswith("cmpl-")
    assert reply["choices"] == [
        {"index": 0, "text": "A bird is an animal.", "logprobs": None, "finish_reason": "stop"}
    ]
    assert engine.requests[0].settings.max_new_tokens == 16
    assert engine.requests[0].stop_ids == served.stop_ids


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (PROMPT, [PROMPT]),
        ([PROMPT, "A"], [PROMPT, "A"]),
        ([5, 17, 3], [[5, 17, 3]]),
        ([[5, 17], [3]], [[5, 17], [3]]),
        ("<|im_start|>user", ["<|im_start|>user"]),
    ],
)
def test_prompts_are_texts_or_ids_one_or_many(client, engine, served, prompt, expected):
    reply = post(client, prompt=prompt, n=2)
    tokens = [served.tokenizer.encode(each) if isinstance(each, str) else each for each in expected]
    asked = [list(request.prompt) for request in engine.requests]
    assert asked == [each for each in tokens for _ in range(2)]
    assert [choice["index"] for choice in reply["choices"]] == list(range(2 * len(tokens)))
    assert reply["usage"]["prompt_tokens"] == sum(map(len, tokens))


def test_echo_puts_the_prompt_before_the_text_streamed_and_not(client):
    whole = PROMPT + "A bird is an animal."
    assert post(client, echo=True)["choices"][0]["text"] == whole
    pieces = events(client, "/v1/completions", prompt=PROMPT, echo=True)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole
    assert pieces[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_the_older_form_and_tell_where_tokens_stand(client, engine, served, stream):
    engine.answer = "Oslo 🐦 é"
    if stream:
        pieces = [
            piece["choices"][0]["logprobs"]
            for piece in events(client, "/v1/completions", prompt=PROMPT, logprobs=2)
        ]
        told = {key: [value for piece in pieces for value in piece[key]] for key in pieces[0]}
    else:
        told = post(client, logprobs=2)["choices"][0]["logprobs"]
    tokens = served.tokenizer.encode(engine.answer)
    assert len(tokens) < 16
    assert told["token_logprobs"] == [-0.5] * len(tokens)
    assert [len(top) for top in told["top_logprobs"]] == [2] * len(tokens)
    offsets = [len(served.tokenizer.decode(tokens[:place]).rstrip("\ufffd")) for place in range(len(tokens))]
    assert told["text_offset"] == offsets
    # A token that is a part of a character is told as its bytes.
    told_bytes = [
        bytes.fromhex(name.removeprefix("bytes:").replace("\\x", ""))
        if name.startswith("bytes:")
        else name.encode()
        for name in told["tokens"]
    ]
    assert b"".join(told_bytes).decode() == engine.answer
    assert any(name.startswith("bytes:\\xf0") for name in told["tokens"])


def test_a_stream_adds_up_to_the_whole_and_ends_with_the_usage(client):
    whole = post(client, n=2)
    pieces = events(client, "/v1/completions", prompt=PROMPT, n=2, stream_options={"include_usage": True})
    for index in range(2):
        own = [choice for piece in pieces for choice in piece["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == whole["choices"][index]["text"]
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["stop"]
    assert pieces[-1]["usage"] == whole["usage"]
    assert {piece["object"] for piece in pieces} == {"text_completion"}


def test_best_of_as_many_as_are_told_is_nothing_special(client):
    assert len(post(client, n=2, best_of=2, suffix="")["choices"]) == 2
