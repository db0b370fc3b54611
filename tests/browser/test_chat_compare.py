"""Two models side by side on the chat page, in a server that serves both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from ..service.live import Live
from ..service.real import write_checkpoint
from ..service.test_models import SMALL, serving, write
from .chat import answers, ask, bodies, ended, open_chat

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The same random weights under two names."""
    folder = tmp_path_factory.mktemp("two")
    write_checkpoint(folder)
    tiny = {**SMALL, "model": str(folder), "load_format": "dummy", "dtype": "float32"}
    with serving(write(folder, {"before": tiny, "after": tiny})) as server:
        yield server


def test_two_models_answer_side_by_side(page: Page, two: Live) -> None:
    page.set_default_timeout(60_000)  # each model is loaded first
    errors = open_chat(page, two)
    sent = bodies(page)
    page.keyboard.press("Control+.")
    assert "after (unloaded)" in page.locator("#settings [name=second]").inner_text()
    page.select_option("#settings [name=second]", "after")
    page.fill("#settings [name=temperature]", "0")
    page.fill("#settings [name=max_tokens]", "8")
    page.keyboard.press("Control+.")
    ask(page, "hi")
    assert page.locator(".who").all_inner_texts() == ["before", "after"]
    assert [body["model"] for body in sent] == ["before", "after"]
    boxes = [box.bounding_box() for box in page.locator(".reply").all()]
    assert boxes[0] and boxes[1] and boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]
    figures = page.locator(".reply .figures").all_inner_texts()
    assert len(figures) == 2 and all("load of the model included" in line and "8 out" in line for line in figures)
    assert page.get_by_text("Both answers are equal.").is_visible()
    page.locator("#settings [name=second]:has-text('before (asleep)')").wait_for(state="attached")
    assert page.locator("#model").inner_text() == "before | after"

    page.set_viewport_size({"width": 390, "height": 800})
    boxes = [box.bounding_box() for box in page.locator(".reply").all()]
    assert boxes[0] and boxes[1] and boxes[0]["x"] == boxes[1]["x"] and boxes[0]["y"] < boxes[1]["y"]
    page.set_viewport_size({"width": 1280, "height": 720})

    page.reload()
    page.locator("#model:has-text('before | after')").wait_for()
    page.locator(".reply").nth(1).locator(".edit").click()
    page.fill(".editor textarea", "Another answer")
    page.press(".editor textarea", "Enter")
    page.locator(".agreement").wait_for()
    assert "differ from the first word" in page.locator(".agreement").inner_text()
    sent.clear()
    ask(page, "more")
    assert len(answers(page)) == 4
    assert [body["messages"][1]["content"] == "Another answer" for body in sent] == [False, True], "each sees its own"

    sent.clear()
    page.locator(".reply").nth(3).locator(".again").click()
    ended(page)
    assert [body["model"] for body in sent] == ["after"]
    assert errors == []


def test_a_stop_ends_both(page: Page, two: Live) -> None:
    page.set_default_timeout(60_000)
    open_chat(page, two)
    page.keyboard.press("Control+.")
    page.select_option("#settings [name=second]", "after")
    page.keyboard.press("Control+.")
    page.fill("#words", "hi")
    page.press("#words", "Enter")
    page.locator(".running").first.wait_for()
    page.keyboard.press("Escape")
    ended(page)
    assert page.locator(".figures:has-text('stopped')").count() == 2
