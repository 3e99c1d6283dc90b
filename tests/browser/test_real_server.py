"""The chat page in front of the real server and the built-in model."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.inference.server.served_process import ServedProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = pytest.mark.browser

KEY = "a-key-of-the-test"
PATIENCE = 60_000  # milliseconds


@pytest.fixture(scope="module")
def server() -> Iterator[ServedProcess]:
    with ServedProcess("--slots", "2", environment={"QWEN35_API_KEY": KEY}) as server:
        yield server


@pytest.fixture
def chat(browser: Browser, server: ServedProcess) -> Iterator[Page]:
    """The page, once the server has taken its key."""
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.goto(server.address)
    page.wait_for_function("() => document.activeElement.id == 'key'")
    page.get_by_label("API key").fill(KEY)
    page.get_by_label("API key").press("Enter")
    page.wait_for_function("() => document.activeElement.id == 'message'")
    yield page
    context.close()
    assert [fault for fault in faults if "status of 40" not in fault] == []


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def test_the_built_in_model_answers_at_the_page(chat: Page) -> None:
    assert chat.locator("#model").inner_text() == "nano"
    for question, answer in (
        ("What is the capital of France?", "Paris"),
        ("What is the capital of Italy?", "Rome"),
    ):
        ask(chat, question)
        turn = chat.locator(".answer").last
        turn.locator(".numbers", has_text="first after").wait_for()
        assert answer in turn.locator(".content").inner_text()
        assert re.match(r"\d+ tokens · \d+(\.\d)? tokens/s · ", turn.locator(".numbers").inner_text())
    assert chat.locator(".turn").count() == 4


def test_stop_frees_the_slot(chat: Page, server: ServedProcess) -> None:
    def without_end(route: Route) -> None:
        route.continue_(
            post_data=json.dumps({**json.loads(route.request.post_data or ""), "ignore_eos": True})
        )

    chat.route("**/v1/chat/completions", without_end)
    cancelled = 'qwen35_ended_requests_total{outcome="cancelled"}'
    before = server.metrics()[cancelled]
    ask(chat, "What is the capital of France?")
    chat.get_by_text("Paris").wait_for()
    chat.get_by_role("button", name="Stop").click()
    chat.locator(".numbers", has_text="stopped").wait_for()
    deadline = time.monotonic() + 30
    while (metrics := server.metrics())[cancelled] == before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert metrics[cancelled] == before + 1
    assert metrics["qwen35_slots_occupied"] == 0


def test_a_setting_that_the_server_refuses_is_told_by_its_field(chat: Page) -> None:
    chat.get_by_label("Top p").fill("0")
    ask(chat, "Hi")
    error = chat.get_by_role("alert")
    error.wait_for()
    assert error.inner_text().startswith("top_p ")
