"""The pages: served with nothing from outside, open to all, while what they show asks for the key."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

import ridgeline
import ridgeline.service.pages as pages
from ridgeline.metrics.agent_runs import SILENCE_S
from ridgeline.metrics.catalogue import COUNTERS, GAUGES, HISTOGRAMS, LIVE
from ridgeline.metrics.metrics import FAMILIES

from .live import Live, behaviour, live, says

FILES = sorted(path for path in (Path(pages.__file__).parent / "web").rglob("*") if path.is_file())
SCRIPTS = [file for file in FILES if file.suffix == ".js"]
IMPORT = re.compile(r"""(?:from|import) "([^"]+)";""")
UNSAFE = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|ContextualFragment|\beval\(|new Function|srcdoc"
)
OUTSIDE = re.compile(r"""(?:src|href|url|from|import|fetch)\W{1,3}(?:https?:)?//""")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_nothing_comes_from_outside(file: Path) -> None:
    assert not OUTSIDE.search(file.read_text())


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_scripts_make_elements_without_html_from_strings(file: Path) -> None:
    """Browsers with Trusted Types refuse it; others would do it."""
    assert not UNSAFE.search(file.read_text())


def test_scripts_import_what_is_served(polite: Live) -> None:
    web = Path(pages.__file__).parent / "web"
    imports = {(file.parent / name).resolve() for file in SCRIPTS for name in IMPORT.findall(file.read_text())}
    assert len(imports) > 12
    for file in {*imports, *SCRIPTS}:
        answer = polite.get(f"/dashboard/{file.relative_to(web)}")
        assert answer.status == 200, file
        assert answer.headers["content-type"] == "text/javascript; charset=utf-8"
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert polite.get("/dashboard/chat/nothing.js").status == 404
    assert polite.get("/dashboard/chat/../pages.py").status == 404


@pytest.mark.parametrize("path", ["/", "/dashboard", "/chat", "/docs"])
def test_pages_are_confined(polite: Live, path: str) -> None:
    headers = polite.send("GET", path, headers={"accept": "text/html"}).headers
    policy = dict(rule.partition(" ")[::2] for rule in headers["content-security-policy"].split("; "))
    assert policy == {
        "default-src": "'self'",
        "img-src": "data:",
        "base-uri": "'self'",
        "form-action": "'self'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"


def test_pages_and_their_parts_are_served(polite: Live) -> None:
    for path in ("/", "/dashboard", "/chat", "/docs"):
        answer = polite.send("GET", path, headers={"accept": "text/html"})
        assert answer.status == 200 and answer.headers["content-type"].startswith("text/html")
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        for part in re.findall(r'(?:src|href)="(dashboard/[^"]+)"', answer.data.decode()):
            assert polite.get(f"/{part}").status == 200, part
    assert polite.get("/dashboard/nothing.js").status == 404
    assert polite.get("/dashboard/..%2fpages.js").status == 404


BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


def test_the_root_leads_browsers_to_the_pages(polite: Live) -> None:
    answer = polite.send("GET", "/", headers={"accept": BROWSER})
    page = answer.data.decode()
    assert answer.headers["content-type"].startswith("text/html") and answer.headers["vary"] == "accept"
    for link in ("/chat", "/dashboard", "/docs", "/openapi.json", "/metrics", "/health"):
        assert f'href="{link[1:]}"' in page and polite.get(link).status == 200, link
    assert f"curl -N http://127.0.0.1:{polite.port}/v1/chat/completions -H 'content-type: application/json'" in page
    assert page.count("tiny-test") >= 3 and "authorization" not in page and "$" not in page


def test_the_root_shows_markup_in_names_as_text() -> None:
    with live(behaviour(says("hi")), api_key="sesame") as server:
        server.server.front.metrics.model_name = "<b>&$model"
        answer = server.send("GET", "/", headers={"accept": BROWSER, "host": "<script>"})
        assert answer.headers["content-type"] == "application/json" or b"<script>" not in answer.data
        page = server.send("GET", "/", headers={"accept": BROWSER}).data.decode()
        assert "&lt;b&gt;&amp;$model" in page and "<b>" not in page
        assert "-H &quot;authorization: Bearer $RIDGELINE_API_KEY&quot;" in page and "sesame" not in page


@pytest.mark.parametrize("accept", [None, "*/*", "application/json", "text/html;q=0, application/json"])
def test_the_root_answers_programs_with_json(polite: Live, accept: str | None) -> None:
    answer = polite.send("GET", "/", headers={"accept": accept} if accept else {})
    assert answer.headers["content-type"] == "application/json" and answer.headers["vary"] == "accept"
    body = answer.json
    assert (body["name"], body["version"], body["model"]) == ("ridgeline", ridgeline.__version__, "tiny-test")
    assert body["docs"] == "/docs" and body["openapi"] == "/openapi.json"
    for path in (value for value in body.values() if value.startswith("/")):
        assert polite.get(path).status == 200, path


def test_grafana_and_prometheus_ask_for_metrics_that_exist(polite: Live) -> None:
    asked = set()
    for name in ("grafana.json", "alerts.yml"):
        answer = polite.get(f"/dashboard/{name}")
        assert answer.status == 200
        asked |= set(re.findall(r"ridgeline:(\w+?)(?:_total|_bucket)?[\[{ ,]", answer.data.decode()))
    ours = {*GAUGES, *COUNTERS, *HISTOGRAMS, *LIVE, *FAMILIES}
    assert len(asked) > 20 and asked <= ours


def test_the_key_guards_what_the_pages_show() -> None:
    with live(behaviour(says("hi")), api_key="sesame") as server:
        for path in (
            "/",
            "/dashboard",
            "/chat",
            "/docs",
            "/openapi.json",
            "/dashboard/charts.js",
            "/dashboard/chat/main.js",
        ):
            assert server.get(path).status == 200, path
        for path in ("/dashboard/data", "/requests", "/metrics"):
            assert server.get(path).status == 401
            assert server.send("GET", path, headers={"authorization": "Bearer sesame"}).status == 200


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_a_browser_shows_the_figures(polite: Live, tmp_path: Path) -> None:
    agent_runs = polite.server.front.metrics.live.agent_runs
    for turn in range(3):
        name = polite.chat({"x-run-id": "trip"}).json["id"]
        polite.until(lambda expected=turn + 1: agent_runs.find("trip").calls == expected)
    polite.until(lambda: agent_runs.tick(time.perf_counter() + SILENCE_S) is None)
    polite.chat({"x-run-id": "open"})
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    command = ["chromium", *flags, f"--user-data-dir={tmp_path}", "--virtual-time-budget=4000", "--dump-dom"]
    page = f"http://127.0.0.1:{polite.port}/dashboard"
    shown = subprocess.run([*command, page], capture_output=True, text=True, timeout=60, check=True).stdout
    assert 'class="dot good"' in shown and "Time to first token" in shown
    assert name[:17] in shown, "the slowest requests"
    assert "Time to publish" in shown and "arriving per minute" in shown and "Speed of one user" in shown
    assert "medians: 3 calls, " in shown and "1 open" in shown
    assert shown.count("<svg") >= 5
