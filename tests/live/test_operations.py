"""The commands together: `ridgeline serve` with JSON logs, traces and a profile, behind `ridgeline route`, seen by the doctor."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from ridgeline.cli.doctor_server import check_server
from tests.service.collector import collecting
from tests.service.replicas import CHAT

LISTENING = re.compile(r"listening on (http://[^;\s]+)")


@contextmanager
def command(*words: str, until: str) -> Iterator[tuple[str, list[dict[str, object]]]]:
    """A command that has logged a message that begins with `until`: its address, and its log lines, complete after the block."""
    process = subprocess.Popen([sys.executable, "-m", "ridgeline", *words], stderr=subprocess.PIPE, text=True)
    lines: list[dict[str, object]] = []
    try:
        assert process.stderr is not None
        while not str((lines[-1:] or [{"message": ""}])[0]["message"]).startswith(until):
            lines.append(json.loads(process.stderr.readline()))
        url = next(match[1] for line in lines if (match := LISTENING.search(str(line["message"]))))
        yield url, lines
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read().splitlines()
        lines += [json.loads(line) for line in rest if not line.startswith("USDT")]  # the profiler's own
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def post(url: str, body: object, **headers: str) -> bytes:
    """The body of the answer, whatever its status."""
    names = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), names)) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        return error.read()


def test_a_router_logs_json() -> None:
    with command(
        "route", "--replica", "http://127.0.0.1:9", "--port", "0", "--log-format", "json", until="listening"
    ) as (url, lines):
        refused = json.loads(post(f"{url}/v1/chat/completions", CHAT, x_request_id="mine"))
        assert refused["request_id"] == "mine" and refused["error"]["message"]
    assert lines[0]["level"] == "info" and "routing to 1 server" in str(lines[0]["message"])


@pytest.mark.long
def test_everything_at_once() -> None:
    common = ("--port", "0", "--log-format", "json", "--log-level", "info", "--admin-api-key", "operator")
    with ExitStack() as stack:
        collector = stack.enter_context(collecting())
        traced = (*common, "--otlp-traces-endpoint", collector.url)
        server, served = stack.enter_context(command("serve", "--device", "cpu", *traced, until="ready"))
        router, routed = stack.enter_context(command("route", "--replica", server, *traced, until="listening"))
        states = {check.name: check.state for check in check_server(server)}
        assert states == dict.fromkeys(("server", "clock", "version", "models", "metrics"), "ok")
        body = {"prompt": "Once upon a time", "max_tokens": 20, "ignore_eos": True}
        answer = json.loads(post(f"{router}/v1/completions", body, x_request_id="mine"))
        assert answer["usage"]["completion_tokens"] == 20
        trace = post(f"{server}/debug/profile", {"seconds": 0.1}, x_api_key="operator")
        assert trace[:2] == b"\x1f\x8b"
    for lines in (served, routed):
        assert [line["status"] for line in lines if line.get("request_id") == "mine"] == [200]
    span = next(span for span in collector.spans if span.name.startswith("text_completion"))
    assert next(other for other in collector.spans if other.id == span.parent).attributes["ridgeline.attempts"] == 1
    parts = [collector.named(f"engine.{part}") for part in ("queue", "prefill", "decode")]
    assert [part.parent for part in parts] == [span.id] * 3
    assert (
        span.start <= parts[1].start <= parts[1].end == pytest.approx(parts[2].start)
        and parts[2].end <= span.end + 0.01
    )
    assert parts[2].end - parts[2].start > 0.005
