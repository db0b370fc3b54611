"""The pages in a browser: what they show, with and without an SLO, after disconnects, and what they send."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from ridgeline.metrics.history import READING_S, Reading

from ..service.live import Live, behaviour, counts, live, says

if TYPE_CHECKING:
    from playwright.sync_api import Page

PAGES = ("/", "/dashboard", "/chat", "/docs")


@pytest.fixture(scope="module")
def plain() -> Iterator[Live]:
    with live(behaviour(says("Hello there"))) as running:
        yield running


def visit(page: Page, server: Live, path: str) -> list[str]:
    """Open a page; returns a list that grows by every error that the browser reports."""
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(f"http://127.0.0.1:{server.port}{path}")
    return errors


def ended(server: Live, name: str) -> None:
    server.until(lambda: server.server.front.metrics.live.find(name) is not None)


def disconnect(server: Live, name: str) -> None:
    """A client that leaves in the middle of its answer."""
    connection = server.connect()
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 1000}
    headers = {"content-type": "application/json", "x-request-id": name}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    response.readline()
    response.close()
    connection.close()
    ended(server, name)


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_render_without_an_error(page: Page, plain: Live, path: str, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    errors = visit(page, plain, path)
    page.get_by_text("tiny-test").first.wait_for()
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(246, 246, 243)" if scheme == "light" else "rgb(20, 22, 26)")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != ground
    overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert overflow <= 0 and errors == []


def test_the_dashboard_without_an_slo(page: Page, plain: Live) -> None:
    name = plain.chat({"x-request-id": "seen-in-the-table"}).json["id"]
    ended(plain, name)
    errors = visit(page, plain, "/dashboard")
    page.get_by_text("no SLO is declared (--slo)").wait_for()
    assert page.locator("#model").inner_text().startswith("tiny-test")
    assert page.title() == "tiny-test · Ridgeline dashboard"
    assert page.locator(".banner").count() == 0 and page.locator("line.limit").count() == 0
    assert "Missed the SLO" not in page.locator("main").inner_text()
    table = page.locator("#slowest").inner_text()
    assert name[:17] in table and "seen-in-the-table"[:17] in table
    assert errors == []


def test_disconnects_and_failures_are_no_misses_without_an_slo(page: Page) -> None:
    with live(behaviour(counts, delay=0.005)) as server:
        for turn in range(3):
            disconnect(server, f"gone-{turn}")
        visit(page, server, "/dashboard")
        page.get_by_text("Ended early in the last five minutes: 3 disconnected by the client.").wait_for()
        assert page.locator(".banner").count() == 0
        assert "Missed" not in page.locator("#ended").inner_text()


def test_the_dashboard_with_an_slo(page: Page) -> None:
    with live(behaviour(says("slow")), slo="ttft=0.001ms,e2e=60s") as server:
        ended(server, server.chat().json["id"])
        errors = visit(page, server, "/dashboard")
        page.get_by_text("0 % of requests met ttft=0.001ms,e2e=60000ms").wait_for()
        page.get_by_text("Missed the SLO in the last five minutes: 1 in ").wait_for()
        assert "Dotted: the limits of the SLO" in page.locator("#latencynote").inner_text()
        assert "TTFT limit 1 µs" in page.locator("#latency .legend").inner_text()
        lines = "#latency svg.chart path[stroke-dasharray='5 3'], #latency svg.chart line.limit"
        page.locator(lines).nth(2).wait_for(state="attached")  # the charts follow with the next reading
        dashes = page.locator("#latency svg.chart").evaluate(
            """chart => [...chart.querySelectorAll("path[stroke-dasharray='5 3'], line.limit")]
                 .map(line => getComputedStyle(line).strokeDasharray)"""
        )
        assert len(dashes) == 3 and len(set(dashes)) == 2, "the limit's line differs from those of p95"
        assert errors == []


def test_the_charts_are_filled_from_what_the_server_kept(page: Page) -> None:
    with live(behaviour(says("hi"))) as server:
        ended(server, server.chat().json["id"])
        history = server.server.front.metrics.live.history
        now = history.readings[-1].at if history.readings else 0.0

        def keep() -> bool:
            history.readings.clear()
            for place in range(300):
                latencies = {"ttft": {"p50": 0.1, "p95": 0.2}, "tpot": {"p50": 0.01, "p95": 0.02}}
                figures = {"output_tokens_per_second": 100.0 + place, "prompt_tokens_per_second": 50.0}
                shares = {"running": place % 7, "waiting": 1, "kv_used": 0.5, "kv_cached": 0.1}
                history.readings.append(
                    Reading(now - READING_S * (300 - place), latencies, figures, shares, (1.0, 1e9))
                )
            return True

        server.until(keep)
        errors = visit(page, server, "/dashboard")
        for chart in ("latency", "tokens", "queue", "cache"):
            page.locator(f"#{chart} svg.chart path").first.wait_for(state="attached")
            drawn = page.locator(f"#{chart} svg.chart path").first.get_attribute("d") or ""
            assert drawn.count("L") >= 299, chart
            assert "50 min ago" in page.locator(f"#{chart} svg.chart").text_content()
        assert errors == []


def test_the_chat_page_sends_and_shows_an_answer(page: Page, plain: Live) -> None:
    errors = visit(page, plain, "/chat")
    assert page.locator("#clear").inner_text() == "New chat"
    page.fill("#words", "Good morning")
    page.press("#words", "Enter")
    page.get_by_text("Hello there").wait_for()
    page.get_by_text("tokens in (").wait_for()
    assert page.locator(".said.user").inner_text() == "Good morning"
    page.click("#clear")
    assert page.locator(".said").count() == 0 and errors == []


def test_the_documentation_lists_fields_and_tries_a_request(page: Page, plain: Live) -> None:
    errors = visit(page, plain, "/docs#post_v1_completions")
    route = page.locator("#post_v1_completions")
    route.get_by_text("Fields that are refused").wait_for()
    words = route.inner_text()
    assert (
        "Nucleus sampling; 0 keeps only the most probable token." in words
        and "Not supported." in words
        and "Not supported: prompts are never truncated, so send a shorter one." in words
    )
    route.locator("button").click()
    route.get_by_text("200 OK · x-request-id req_").wait_for()
    assert "Hello there" in (route.locator("pre").text_content() or "")
    route.locator("textarea").fill('{"prompt": 7}')
    route.locator("button").click()
    route.get_by_text("400 Bad Request").wait_for()
    assert '"param": "prompt"' in (route.locator("pre").text_content() or "")
    assert [error for error in errors if "400" not in error] == []


def test_the_documentation_asks_for_the_key(page: Page) -> None:
    with live(behaviour(says("hi")), api_key="sesame") as server:
        visit(page, server, "/docs#get_v1_models")
        route = page.locator("#get_v1_models")
        route.locator("button").click()
        page.get_by_text("This server requires an API key").wait_for()
        page.fill("input[name=key]", "sesame")
        page.get_by_text("Save in this browser").click()
        route.locator("button").click()
        route.get_by_text("200 OK").wait_for()


def test_the_home_page_shows_the_address_that_the_browser_uses(page: Page, plain: Live) -> None:
    errors = visit(page, plain, "/")
    command = page.locator("#curl").inner_text()
    assert command.startswith(f"curl -N http://127.0.0.1:{plain.port}/v1/chat/completions")
    page.click("text=API documentation")
    page.get_by_text("Routes of the OpenAI API").wait_for()
    assert errors == []
