"""The chat page takes back an answer that the server withdraws."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..service.live import behaviour, live, says

if TYPE_CHECKING:
    from playwright.sync_api import Page


async def judge(text: str) -> bool | str:
    return "I cannot say that." if "secret" in text else False


def test_a_withdrawn_answer_is_replaced(page: Page) -> None:
    text = "All is well. But then came the secret word."
    judged = {"moderation": f"{__name__}:judge", "moderation_mode": "after", "moderation_window": 10}
    with live(behaviour(says(text), delay=0.01), **judged) as server:
        page.goto(f"http://127.0.0.1:{server.port}/chat")
        page.fill("#words", "hi")
        page.click("#send")
        answer = page.locator(".said.assistant.withdrawn")
        answer.wait_for(timeout=5000)
        assert answer.inner_text() == "I cannot say that."
        page.locator("#send:has-text('Send')").wait_for()
        kept = page.evaluate("Object.values(localStorage).join()")
        assert "I cannot say that." in kept and "secret" not in kept
        page.reload()
        answer.wait_for()
        assert answer.inner_text() == "I cannot say that."
