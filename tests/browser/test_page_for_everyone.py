"""The page by keyboard, by screen reader, in both colour schemes and on a small screen; and what it may not do."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from qwen35_jax.inference.server.app import PAGE
from tests.browser.fake_server import Answer, FakeServer, content, refusal, thought

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

# Colours of every visible element with text of its own, and of what stands behind it, as red, green, blue and alpha.
COLOURS = """() => {
    const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const behind = (element) => {
        for (let e = element; e; e = e.parentElement) {
            const colour = channels(getComputedStyle(e).backgroundColor);
            if (colour[3] !== 0) return colour;
        }
    };
    return [...document.body.querySelectorAll("*")]
        .filter((e) => e.checkVisibility() && !e.classList.contains("unseen"))
        .filter((e) => e.value || e.placeholder || [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
        .map((e) => [e.id || e.className || e.tagName, channels(getComputedStyle(e).color), behind(e)]);
}"""


def luminance(colour: list[float]) -> float:
    """Of a colour, by WCAG 2."""
    linear = [
        channel / 255 / 12.92 if channel / 255 <= 0.04045 else ((channel / 255 + 0.055) / 1.055) ** 2.4
        for channel in colour[:3]
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: list[float], second: list[float]) -> float:
    lighter, darker = sorted((luminance(first), luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def fill_page(page: Page, fake: FakeServer) -> None:
    """Something of everything that the page shows."""
    wide = "x" * 300
    text = f"Some `code`.\n\n```python\n{wide}\n```\n\n|a|b|\n|-|-|\n|{'c ' * 200}|d|\n\n{wide}"
    fake.answers = [Answer([thought("Hm. " + wide), content(text)]), refusal(400, "no")]
    for message in ("Hi " + wide, "And?"):
        page.get_by_label("Message").fill(message)
        page.get_by_label("Message").press("Enter")
        page.get_by_role("button", name="Send").wait_for()
    page.get_by_role("alert").wait_for()
    page.locator("summary").first.click()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_either_colour_scheme(page: Page, fake: FakeServer, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    fill_page(page, fake)
    colours = page.evaluate(COLOURS)
    names = {name for name, _, _ in colours}
    assert {"error", "thoughts-text", "hint", "send", "model", "numbers", "keys"} <= names
    weak = {name: contrast(text, behind) for name, text, behind in colours if contrast(text, behind) < 4.5}
    assert weak == {}
    assert (luminance(colours[0][2]) < 0.2) == (scheme == "dark")


@pytest.mark.parametrize("width", [320, 390, 800, 1200])
def test_nothing_is_wider_than_the_screen(page: Page, fake: FakeServer, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 640})
    fill_page(page, fake)
    for shown in (False, True):
        if page.locator("#settings").is_visible() != shown:
            page.get_by_role("button", name="Settings").click()
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width
        assert page.evaluate("() => document.getElementById('conversation').scrollWidth") <= width
        assert page.evaluate("() => document.documentElement.scrollHeight") <= 640
        toggle = page.get_by_role("button", name="Settings")
        assert toggle.get_attribute("aria-expanded") == str(shown).lower()


def test_settings_stand_aside_on_wide_screens_and_give_way_on_small_ones(page: Page) -> None:
    assert page.get_by_label("Temperature").is_visible()
    page.set_viewport_size({"width": 600, "height": 640})
    page.get_by_label("Temperature").wait_for(state="hidden")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("1")


def test_every_control_has_a_name_and_can_be_reached_by_keyboard(page: Page, fake: FakeServer) -> None:
    fake.key = "secret"
    page.reload()
    page.wait_for_function("() => document.activeElement.id == 'key'")
    fake.key = None
    fake.answers = [Answer([thought("Hm."), content("```\nx\n```")])]
    page.get_by_label("Message").fill("Hi")
    page.get_by_label("Message").press("Enter")
    page.locator(".numbers", has_text="first after").wait_for()
    controls = page.evaluate("""() => [...document.querySelectorAll("input, select, textarea, button, summary")]
        .filter((e) => e.checkVisibility())
        .map((e) => e.labels?.[0]?.innerText || e.ariaLabel || e.innerText)""")
    assert len(controls) >= 12
    assert all(name.strip() for name in controls)
    reached = []
    page.get_by_role("button", name="New chat").focus()
    for _ in range(25):
        reached.append(page.evaluate("() => document.activeElement.id || document.activeElement.className"))
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement === document.body"):
            break
    order = [
        "new-chat",
        "settings-toggle",
        "conversation",
        "copy",
        "again",
        "message",
        "send",
        "key",
        "system",
    ]
    assert [name for name in reached if name in order] == order


def test_those_who_do_not_see_are_told_when_and_not_word_by_word(page: Page, fake: FakeServer) -> None:
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.get_by_role("log").get_attribute("aria-live") == "off"
    fake.answers = [Answer([content("One")], hold_after=1)]
    page.get_by_label("Message").fill("Hi")
    page.get_by_label("Message").press("Enter")
    status = page.get_by_role("status")
    status.get_by_text("The answer is coming.").wait_for()
    fake.release.set()
    status.get_by_text("The answer is complete.").wait_for()
    headings = page.locator("h1, h2").all_inner_texts()
    assert headings[0].startswith("qwen35")
    assert headings[1:] == ["You", "Answer"]


def test_nothing_moves_where_that_is_not_wanted(page: Page, fake: FakeServer) -> None:
    fake.answers = [Answer([content("One")], hold_after=1)]
    page.get_by_label("Message").fill("Hi")
    page.get_by_label("Message").press("Enter")
    page.get_by_text("One", exact=True).wait_for()
    assert page.evaluate("() => document.getAnimations().length") == 0
    page.emulate_media(reduced_motion="no-preference")
    assert page.evaluate("() => document.getAnimations().length") == 1


def test_the_page_keeps_to_a_strict_policy(browser: Browser, fake: FakeServer) -> None:
    """That it asks no one else and logs nothing is looked at after every test, in the fixture `page`."""
    for file in PAGE.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", file.read_text()
        )
    text = (PAGE / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|\sstyle=|https?://", text)
    context = browser.new_context()
    try:
        blocked = context.new_page()
        violations: list[str] = []
        blocked.on("console", lambda message: violations.append(message.text))
        blocked.goto(fake.url)
        blocked.evaluate("() => { document.createElement('img').src = 'http://127.0.0.1:9/x'; }")
        blocked.wait_for_timeout(300)
        assert any("Content Security Policy" in violation for violation in violations)
    finally:
        context.close()
