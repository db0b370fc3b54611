"""A real browser for tests: Debian's Chromium, driven by Playwright.

Every test in this folder carries the marker `long`. Tests are skipped where Chromium or Playwright is missing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ARGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:  # pytest hands over the tests of all folders
        if item.path.is_relative_to(folder):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for the tests of a module.

    Not for the whole session: while it is open, Playwright keeps an event loop in this thread, and asynchronous tests
    of other modules could not start one.
    """
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs the extra long (make test-long)")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs Chromium (apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=list(ARGS))
        yield started
        started.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """An empty tab of a fresh profile."""
    context = browser.new_context()
    yield context.new_page()
    context.close()
