"""Who may ask a server, and what it tells of itself."""

from __future__ import annotations

import re

import pytest
from starlette.testclient import TestClient

from qwen35_jax.inference.server.app import create_app
from tests.inference.server.scripted_engine import CONTEXT, ScriptedEngine
from tests.inference.server.test_refusals import CHAT, body, refused

KEY = "sk-secret"


def guarded(
    served, *, api_key: str | None = KEY, local: bool = False, host: str = "testserver"
) -> TestClient:
    engine = ScriptedEngine(served.tokenizer)
    app = create_app(
        engine,  # pyright: ignore[reportArgumentType]
        served,
        api_key=api_key,
        local=local,
        max_body_bytes=1000,
        most_choices=8,
    )
    return TestClient(app, base_url=f"http://{host}")


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (None, "missing"),
        (f"Basic {KEY}", "wrong"),
        ("Bearer", "missing"),
        ("Bearer sk-secre", "wrong"),
        ("Bearer sk-secret2", "wrong"),
        ("Bearer \u00ffkey", "wrong"),
    ],
)
def test_without_the_key_nothing_is_answered(served, header, complaint):
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    client = guarded(served)
    for response in (
        client.post(CHAT, json=body(CHAT, {}), headers=headers),
        client.get("/v1/models", headers=headers),
    ):
        error = refused(response, 401)
        assert complaint in error["message"] and error["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        assert KEY not in response.text


def test_with_the_key_everything_is_answered_and_without_it_health_and_metrics(served):
    client = guarded(served)
    headers = {"authorization": f"bearer {KEY}"}
    assert client.post(CHAT, json=body(CHAT, {}), headers=headers).status_code == 200
    assert client.get("/health").status_code == client.get("/metrics").status_code == 200


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "a.localhost", "[::1]"]
)
def test_a_server_for_this_machine_is_called_by_names_of_this_machine(served, host):
    client = guarded(served, api_key=None, local=True)
    assert client.get("/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", ""]
)
def test_a_page_whose_name_points_here_is_refused(served, host):
    client = guarded(served, api_key=None, local=True)
    assert refused(client.get("/v1/models", headers={"host": host}))["code"] == "unknown_host"
    assert (
        guarded(served, api_key=None, local=False).get("/v1/models", headers={"host": host}).status_code
        == 200
    )


def test_models_are_the_one_that_is_served(client):
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert listed["data"] == [client.get("/v1/models/nano").json()]
    assert listed["data"][0]["id"] == "nano" and listed["data"][0]["object"] == "model"
    assert listed["data"][0]["max_model_len"] == CONTEXT


def test_metrics_count_requests_by_endpoint_and_status_and_show_the_engine(client, engine):
    for fields in ({}, {}, {"n": 0}):
        client.post(CHAT, json=body(CHAT, fields))
    client.get("/nothing/at/all")
    text = client.get("/metrics").text
    found = dict(re.findall(r"^(\w+(?:\{.*?\})?) (\S+)$", text, re.MULTILINE))
    assert found[f'qwen35_http_requests_total{{endpoint="{CHAT}",status="200"}}'] == "2.0"
    assert found[f'qwen35_http_requests_total{{endpoint="{CHAT}",status="400"}}'] == "1.0"
    assert found['qwen35_http_requests_total{endpoint="other",status="404"}'] == "1.0"
    assert found[f'qwen35_time_to_first_token_seconds_count{{endpoint="{CHAT}"}}'] == "2.0"
    assert found[f'qwen35_request_duration_seconds_count{{endpoint="{CHAT}"}}'] == "3.0"
    assert found["qwen35_compiled_programs"] == "5.0" and found["qwen35_slots"] == "4.0"
    assert found["qwen35_submitted_requests_total"] == "2.0"
    assert (
        found["qwen35_prefix_cache_held_bytes"] == "7.0" and found["qwen35_prefix_cache_hits_total"] == "3.0"
    )
    assert float(found["process_resident_memory_bytes"]) > 0


def test_every_request_is_one_line_on_standard_error_whatever_its_path_holds(client, capsys):
    client.post(CHAT, json=body(CHAT, {}))
    client.get("/a%0A%1B[2Jb")
    client.get("/health")
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"POST /v1/chat/completions 200 \S+ s, \d+ tokens \(3 cached\), then \d+, first after .*", lines[0]
    )
    assert re.fullmatch(r"GET /a\S*2Jb 404 \S+ s", lines[1]) and lines[1].isprintable()
    assert len(lines) == 2


def test_the_page_is_there_and_may_load_nothing_from_elsewhere(client):
    page = client.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    loaded = re.findall(r'(?:src|href)="(/page/[^"]+)"', page.text)
    assert loaded and all(client.get(path).status_code == 200 for path in loaded)
    for path in ("/page/nothing.js", "/page/../app.py", "/page/%2e%2e/app.py"):
        assert refused(client.get(path), 404)["code"] == "unknown_url"
