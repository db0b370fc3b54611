"""The browser of these tests runs scripts and starts every test with an empty profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ..service.live import Live, behaviour, live, says

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture(scope="module")
def server():
    with live(behaviour(says("hi"))) as running:
        yield running


@pytest.mark.parametrize("turn", [1, 2])
def test_a_profile_is_fresh(page: Page, server: Live, turn: int) -> None:
    page.goto(f"http://127.0.0.1:{server.port}/chat")
    assert page.evaluate("localStorage.getItem('seen')") is None
    page.evaluate("localStorage.setItem('seen', 'yes')")
    assert page.evaluate("fetch('/version').then(reply => reply.status)") == 200
