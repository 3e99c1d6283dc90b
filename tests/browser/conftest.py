"""A real Chromium for the tests of the chat page."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.browser.fake_server import FakeServer, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
PATIENCE = 30_000  # milliseconds

collect_ignore_glob = [] if importlib.util.find_spec("playwright") else ["test_*.py"]


@pytest.fixture(scope="module")  # Playwright's event loop runs as long: tests of other files have their own.
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    program = os.environ.get("QWEN35_CHROMIUM") or next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.fail(
            f"no browser: install chromium, or name one in QWEN35_CHROMIUM (looked for {', '.join(PROGRAMS)})"
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def _fake_server() -> Iterator[FakeServer]:
    with running(FakeServer()) as fake:
        yield fake


@pytest.fixture
def fake(_fake_server: FakeServer) -> Iterator[FakeServer]:
    _fake_server.reset()
    yield _fake_server
    _fake_server.release.set()


@pytest.fixture
def page(browser: Browser, fake: FakeServer) -> Iterator[Page]:
    """The chat page. Fails if anything goes wrong in it, or if it asks anyone but its server."""
    context = browser.new_context(viewport={"width": 1200, "height": 800}, reduced_motion="reduce")
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on(
        "console",
        lambda message: faults.append(message.text) if message.type in ("error", "warning") else None,
    )
    page.on(
        "request",
        lambda request: faults.append(request.url) if not request.url.startswith(fake.url) else None,
    )
    page.goto(fake.url)
    yield page
    context.close()
    expected = ("Failed to load resource",)  # the browser's own note on a status that a test asked for
    assert [fault for fault in faults if not fault.startswith(expected)] == []
