"""What a person does at the chat page, in a real browser."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.browser.fake_server import Answer, FakeServer, content, nonsense, refusal, thought

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.browser

HELLO = Answer([content("Hello"), content(" there.")])


def ask(page: Page, text: str) -> Locator:
    """Sends a message, and returns the turn of its answer."""
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")
    return page.locator(".answer").last


def ended(answer: Locator) -> Locator:
    answer.locator(".numbers", has_text="first after").or_(answer.get_by_role("alert")).first.wait_for()
    return answer


def text_of(answer: Locator) -> str:
    return answer.locator(".content").inner_text()


def test_an_answer_shows_while_it_comes_and_tells_its_numbers_at_the_end(
    page: Page, fake: FakeServer
) -> None:
    fake.answers = [Answer([content("One, "), content("two, "), content("three.")], hold_after=2)]
    answer = ask(page, "Count")
    answer.get_by_text("One, two,").wait_for()
    assert page.locator("#welcome").is_hidden()
    assert page.get_by_role("button", name="Stop").is_visible()
    assert page.get_by_role("button", name="Send").is_hidden()
    assert page.get_by_label("Message").input_value() == ""
    assert fake.requests == [
        {
            "messages": [{"role": "user", "content": "Count"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]
    fake.release.set()
    ended(answer)
    assert text_of(answer) == "One, two, three."
    numbers = answer.locator(".numbers").inner_text()
    assert re.fullmatch(
        r"12 tokens · \d+(\.\d)? tokens/s · 16 of 30 prompt tokens cached · first after \d+(\.\d+)? s",
        numbers,
    )
    assert page.get_by_role("button", name="Send").is_visible()
    assert page.locator("#status").inner_text() == "The answer is complete."
    assert page.locator("#model").inner_text() == "fake-0.8b"


def test_thoughts_are_folded_under_a_summary_that_lives(page: Page, fake: FakeServer) -> None:
    fake.answers = [Answer([thought("First this.\n"), thought("Then that."), content("So.")], hold_after=2)]
    answer = ask(page, "Why?")
    summary = answer.locator("summary")
    answer.get_by_text("Then that.").first.wait_for()
    assert re.fullmatch(r"Thinking for \d\.\d+ s Then that\.", summary.inner_text())
    before = summary.inner_text()
    page.wait_for_function("before => document.querySelector('summary').innerText != before", arg=before)
    assert answer.locator(".thoughts-text").is_hidden()
    fake.release.set()
    ended(answer)
    assert re.fullmatch(r"Thought for \d\.\d+ s, 5 tokens ?", summary.inner_text())
    assert text_of(answer) == "So."
    summary.press("Enter")
    assert answer.locator(".thoughts-text").inner_text() == "First this.\nThen that."


def test_thoughts_without_an_answer_are_shown_as_ended(page: Page, fake: FakeServer) -> None:
    fake.answers = [Answer([thought("Hm"), thought("...")], finish_reason="length")]
    answer = ended(ask(page, "Why?"))
    assert answer.locator("summary").inner_text().startswith("Thought for")
    assert answer.locator(".numbers").inner_text().startswith("cut off: no room for more tokens · 12 tokens")


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_stop_ends_the_answer_and_the_request(page: Page, fake: FakeServer, way: str) -> None:
    fake.answers = [Answer([content("Once upon"), content(" a time")], hold_after=1), HELLO]
    answer = ask(page, "Tell me a story")
    answer.get_by_text("Once upon").wait_for()
    if way == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    ended(answer)
    assert fake.left.wait(10)
    assert answer.locator(".numbers").inner_text().startswith("stopped")
    assert text_of(answer) == "Once upon"
    assert page.get_by_role("button", name="Send").is_visible()
    ended(ask(page, "Another"))
    assert fake.requests[1]["messages"] == [
        {"role": "user", "content": "Tell me a story"},
        {"role": "assistant", "content": "Once upon"},
        {"role": "user", "content": "Another"},
    ]


def test_the_conversation_goes_on_until_a_new_chat(page: Page, fake: FakeServer) -> None:
    fake.answers = [Answer([thought("Hm."), content("Hello.")])]
    ended(ask(page, "Hi"))
    ended(ask(page, "And?"))
    said = [(message["role"], message["content"]) for message in fake.requests[1]["messages"]]
    assert said == [("user", "Hi"), ("assistant", "Hello."), ("user", "And?")]
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".turn").count() == 0
    assert page.locator("#welcome").is_visible()
    ended(ask(page, "Hi again"))
    assert fake.requests[2]["messages"] == [{"role": "user", "content": "Hi again"}]


def test_a_new_chat_stops_the_answer_of_the_old_one(page: Page, fake: FakeServer) -> None:
    fake.answers = [Answer([content("Once")], hold_after=1), HELLO]
    ask(page, "Old").get_by_text("Once").wait_for()
    page.get_by_role("button", name="New chat").click()
    assert fake.left.wait(10)
    assert text_of(ended(ask(page, "New"))) == "Hello there."
    assert fake.requests[1]["messages"] == [{"role": "user", "content": "New"}]


def test_enter_sends_and_shift_enter_begins_a_line(page: Page, fake: FakeServer) -> None:
    fake.answers = [Answer([content("Yes.")], hold_after=1)]
    message = page.get_by_label("Message")
    assert message.evaluate("element => element === document.activeElement")
    message.press("Enter")
    assert fake.requests == []
    height = message.bounding_box()["height"]  # pyright: ignore[reportOptionalSubscript]
    message.press_sequentially("one")
    message.press("Shift+Enter")
    message.press_sequentially("two")
    assert message.bounding_box()["height"] > height  # pyright: ignore[reportOptionalSubscript]
    # Enter that ends the spelling of a character.
    message.dispatch_event("keydown", {"key": "Enter", "isComposing": True})
    assert page.locator(".turn").count() == 0
    message.press("Enter")
    page.get_by_text("Yes.").wait_for()
    message.fill("too early")
    message.press("Enter")
    fake.release.set()
    ended(page.locator(".answer"))
    assert message.input_value() == "too early"
    assert [request["messages"][-1]["content"] for request in fake.requests] == ["one\ntwo"]


def test_settings_reach_the_request_where_they_are_given(page: Page, fake: FakeServer) -> None:
    fake.answers = [HELLO]
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Thinking").select_option(label="On")
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("Top p").fill("0.95")
    page.get_by_label("Most tokens").fill("100")
    ended(ask(page, "Hi"))
    page.get_by_label("Thinking").select_option(label="Off")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Top p").fill("")
    ended(ask(page, "Hi"))
    first, second = fake.requests
    assert first["messages"][0] == {"role": "system", "content": "Be brief."}
    assert first["chat_template_kwargs"] == {"enable_thinking": True}
    assert (first["temperature"], first["top_p"], first["max_completion_tokens"]) == (0.7, 0.95, 100)
    assert second["chat_template_kwargs"] == {"enable_thinking": False}
    assert second["temperature"] == 0
    assert "top_p" not in second
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "user"]


def test_a_setting_out_of_range_is_told_before_anything_is_sent(page: Page, fake: FakeServer) -> None:
    page.get_by_role("button", name="Settings").click()
    assert page.get_by_label("Temperature").is_hidden()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("5")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Message").fill("Hi")
    page.get_by_label("Message").press("Enter")
    assert page.get_by_label("Temperature").evaluate("element => element === document.activeElement")
    assert page.get_by_label("Message").input_value() == "Hi"
    assert fake.requests == []


@pytest.mark.parametrize(
    ("wrong", "message", "kept"),
    [
        (refusal(400, "messages has 5000 tokens, there is room for 4096"), "messages has 5000 tokens", ""),
        (nonsense(502), "The server answered with status 502, and did not say why.", ""),
        (
            Answer([content("Half")], error="the server is shutting down"),
            "the server is shutting down",
            "Half",
        ),
        (
            Answer([content("Half")], done=False),
            "The connection was lost before the answer had ended.",
            "Half",
        ),
    ],
    ids=["refused", "no reason", "failed on the way", "cut off"],
)
def test_errors_are_shown_and_the_request_can_be_tried_again(
    page: Page, fake: FakeServer, wrong: Answer, message: str, kept: str
) -> None:
    fake.answers = [wrong, HELLO]
    answer = ask(page, "Hi")
    error = answer.get_by_role("alert")
    error.wait_for()
    assert error.inner_text().startswith(message)
    assert text_of(answer) == kept
    answer.get_by_role("button", name="Try again").click()
    answer = page.locator(".answer")
    answer.get_by_text("Hello there.").wait_for()
    assert ended(answer).count() == 1
    assert answer.get_by_role("alert").is_hidden()
    assert fake.requests[1]["messages"] == [{"role": "user", "content": "Hi"}]


def test_a_server_that_is_gone_is_told(page: Page, fake: FakeServer) -> None:
    page.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
    error = ask(page, "Hi").get_by_role("alert")
    error.wait_for()
    assert error.inner_text() == "The server cannot be reached. Is it still running?"


def test_the_last_answer_can_be_asked_for_again(page: Page, fake: FakeServer) -> None:
    fake.answers = [HELLO]
    ended(ask(page, "One"))
    ended(ask(page, "Two"))
    again = page.get_by_role("button", name="Try again")
    assert again.count() == 1
    again.click()
    page.wait_for_function("() => document.querySelectorAll('.answer .again:not([hidden])').length == 1")
    assert page.locator(".answer").count() == 2
    assert fake.requests[2] == fake.requests[1]


def test_a_key_is_asked_for_where_the_server_wants_one(page: Page, fake: FakeServer) -> None:
    fake.answers = [HELLO]
    assert page.get_by_label("API key").is_hidden()
    fake.key = "secret-1"
    answer = ended(ask(page, "Hi"))
    assert answer.get_by_role("alert").inner_text() == "the API key is wrong"
    key = page.get_by_label("API key")
    assert key.is_visible()
    assert key.get_attribute("type") == "password"
    page.wait_for_function("() => document.activeElement.id == 'key'")
    key.fill("secret-0")
    key.press("Enter")
    page.get_by_text("the API key is wrong").nth(1).wait_for()
    key.fill("secret-1")
    page.get_by_role("button", name="Use this key").click()
    page.get_by_text("The server takes this key.").wait_for()
    page.wait_for_function("() => document.activeElement.id == 'message'")
    answer.get_by_role("button", name="Try again").click()
    page.get_by_text("Hello there.").wait_for()
    assert page.evaluate("() => localStorage.length + sessionStorage.length + document.cookie.length") == 0


def test_a_page_that_opens_without_the_key_asks_for_it(page: Page, fake: FakeServer) -> None:
    fake.key = "secret"
    page.reload()
    page.wait_for_function("() => document.activeElement.id == 'key'")
    assert page.get_by_label("API key").is_visible()


@pytest.mark.parametrize(("chunk", "line_end"), [(1, "\n"), (7, "\r\n"), (1, "\r\n"), (5, "\r")])
def test_streams_are_read_however_they_are_cut(
    page: Page, fake: FakeServer, chunk: int, line_end: str
) -> None:
    fake.answers = [
        Answer([content("naïve 毕老师 🙂\n\nnext"), content(" line")], chunk=chunk, line_end=line_end)
    ]
    answer = ended(ask(page, "Hi"))
    assert text_of(answer) == "naïve 毕老师 🙂\n\nnext line"
    assert answer.locator(".numbers").inner_text().startswith("12 tokens")


def test_the_end_stays_in_view_unless_the_person_looks_elsewhere(page: Page, fake: FakeServer) -> None:
    lines = [content(f"line {number}\n\n") for number in range(60)]
    fake.answers = [Answer(lines, hold_after=40)]
    answer = ask(page, "Count")
    answer.get_by_text("line 39").wait_for()
    distance = """() => {
        const {scrollHeight, scrollTop, clientHeight} = document.getElementById("conversation");
        return scrollHeight - scrollTop - clientHeight;
    }"""
    assert page.evaluate(distance) < 2
    page.evaluate("() => { document.getElementById('conversation').scrollTop = 50; }")
    fake.release.set()
    ended(answer)
    assert page.evaluate("() => document.getElementById('conversation').scrollTop") == 50
    ask(page, "More")
    page.wait_for_function(f"() => ({distance})() < 2")
