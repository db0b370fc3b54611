"""A page of another site, in a real browser, against a server without a key on loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from ..service.live import Live, behaviour, live, says

if TYPE_CHECKING:
    from playwright.sync_api import Page

SEND = """async ([url, options]) => {
  try {
    const reply = await fetch(url, options);
    return [reply.type, reply.status, reply.type === "opaque" ? "" : await reply.text()];
  } catch (error) {
    return ["error", 0, String(error)];
  }
}"""
LOAD = """([kind, url]) => new Promise(done => {
  const part = document.createElement(kind);
  part.onload = () => done("loaded");
  part.onerror = () => done("refused");
  part.src = url;
  document.body.append(part);
})"""
SUBMIT = """([method, kind, url]) => {
  const form = document.createElement("form");
  Object.assign(form, {method, enctype: kind, action: url});
  const field = document.createElement("input");
  Object.assign(field, {name: '{"prompt": "hi", "a": "', value: '"}'});
  form.append(field);
  document.body.append(form);
  form.submit();
}"""
BODY = '{"prompt": "hi", "max_tokens": 1}'
JSON = {"content-type": "application/json"}
POSTS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/reset_prefix_cache")


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b"<!doctype html><title>another site</title><body></body>"
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture(scope="module")
def site() -> Iterator[int]:
    """Port of another site, which answers to every name of this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.fixture
def server() -> Iterator[Live]:
    with live(behaviour(says("hi"))) as running:
        yield running


def unused(server: Live) -> bool:
    """Nothing reached the engine."""
    return not server.engine.submits and not server.engine.orders


@pytest.fixture(params=["http://localhost:{}", "http://127.0.0.1:{}", "http://evil.localhost:{}"])
def attacker(request: pytest.FixtureRequest, page: Page, site: int) -> Page:
    """A tab on another site: another host name, and another port of the same one."""
    page.goto(request.param.format(site))
    return page


def test_fetch_reaches_nothing(attacker: Page, server: Live) -> None:
    for path in POSTS:
        url = f"http://127.0.0.1:{server.port}{path}"
        simple = {"method": "POST", "body": BODY, "mode": "no-cors", "headers": {"content-type": "text/plain"}}
        assert attacker.evaluate(SEND, [url, simple])[0] == "opaque"  # it was sent, and nobody sees that it was refused
        for headers in (JSON, {}, {"content-type": "text/plain"}):
            kind, _, _ = attacker.evaluate(SEND, [url, {"method": "POST", "body": BODY, "headers": headers}])
            assert kind == "error"
    for path in ("/v1/models", "/requests", "/metrics", "/dashboard/data", "/admin/stats", "/health"):
        assert attacker.evaluate(SEND, [f"http://127.0.0.1:{server.port}{path}", {}])[0] == "error"
    assert unused(server)


def test_forms_and_parts_of_pages_reach_nothing(attacker: Page, server: Live) -> None:
    here = f"http://127.0.0.1:{server.port}"
    for kind in ("img", "script"):
        for path in ("/reset_prefix_cache", "/admin/stats", "/v1/models"):
            assert attacker.evaluate(LOAD, [kind, here + path]) == "refused"
    start = attacker.url
    for method, path in (("post", "/v1/completions"), ("post", "/reset_prefix_cache"), ("get", "/admin/stats")):
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            with attacker.expect_navigation(url=f"{here}{path}**") as navigation:
                attacker.evaluate(SUBMIT, [method, kind, here + path])
            assert navigation.value is not None and navigation.value.status == 403
            attacker.goto(start)
    assert unused(server)


def test_a_name_that_is_bound_to_loopback_reaches_nothing(page: Page, server: Live) -> None:
    """DNS rebinding: for the browser the page and the server have one origin."""
    reply = page.goto(f"http://evil.localhost:{server.port}/chat")
    assert reply is not None and reply.status == 403
    for path in POSTS:
        kind, status, text = page.evaluate(SEND, [path, {"method": "POST", "body": BODY, "headers": JSON}])
        assert (kind, status) == ("basic", 403) and "host_not_allowed" in text
    assert unused(server)


def test_links_to_the_pages_work_and_the_pages_work(attacker: Page, server: Live) -> None:
    here = f"http://127.0.0.1:{server.port}"
    with attacker.expect_navigation() as navigation:
        attacker.evaluate("url => { location.href = url }", f"{here}/chat")
    assert navigation.value is not None and navigation.value.status == 200
    kind, status, text = attacker.evaluate(SEND, ["/v1/completions", {"method": "POST", "body": BODY, "headers": JSON}])
    assert (kind, status) == ("basic", 200) and '"text":"h' in text
    assert len(server.engine.submits) == 1


def test_an_allowed_site_reads_answers(page: Page, site: int) -> None:
    origin = f"http://localhost:{site}"
    with live(behaviour(says("hi")), allowed_origins=origin) as server:
        url = f"http://127.0.0.1:{server.port}/v1/completions"
        asks = {"method": "POST", "body": BODY, "headers": {**JSON, "x-request-id": "mine"}}
        page.goto(origin)
        kind, status, text = page.evaluate(SEND, [url, asks])
        assert (kind, status) == ("cors", 200) and '"text":"h' in text
        page.goto(f"http://evil.localhost:{site}")
        assert page.evaluate(SEND, [url, asks])[0] == "error"
        assert len(server.engine.submits) == 1
