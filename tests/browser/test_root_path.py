"""The pages under a path of a proxy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ..service.live import MODEL, behaviour, live, says

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.mark.parametrize(("name", "shown"), [("chat", f"#model:has-text('{MODEL}')"), ("dashboard", ".dot.good")])
def test_a_page_finds_its_parts_and_its_data(page: Page, name: str, shown: str) -> None:
    answers: list[tuple[str, int]] = []
    page.on("response", lambda response: answers.append((response.url, response.status)))
    with live(behaviour(says("hi")), root_path="/llm") as server:
        page.goto(f"{server.server.url}/{name}")
        page.wait_for_selector(shown)
        assert len(answers) > 3
        for url, status in answers:
            assert url.startswith(f"{server.server.url}/") and status == 200, url
