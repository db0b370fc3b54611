"""What the tests of the chat page share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..service.live import Live

if TYPE_CHECKING:
    from playwright.sync_api import Page


def open_chat(page: Page, server: Live) -> list[str]:
    """Open the page; returns a list that grows by every error that the browser reports."""
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(f"http://127.0.0.1:{server.port}/chat")
    page.locator("#settings [name=first] option").first.wait_for(state="attached")
    return errors


def bodies(page: Page) -> list[Any]:
    """A list that grows by the body of every chat completion that the page requests."""
    sent: list[Any] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if "completions" in request.url else None)
    return sent


def ask(page: Page, words: str) -> None:
    """Send a message and wait until nothing runs."""
    page.fill("#words", words)
    page.press("#words", "Enter")
    ended(page)


def ended(page: Page) -> None:
    page.locator("body:not(:has(.running)) #send:has-text('Send')").wait_for()


def emptied(page: Page) -> None:
    page.locator("body:not(:has(.said))").wait_for()


def answers(page: Page) -> list[str]:
    return page.locator(".said.assistant").all_inner_texts()
