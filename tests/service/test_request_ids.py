"""The id of a request: in the answer's header, in errors, and in each of its log lines."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ridgeline.core.logs import JsonFormatter

from .live import Live, behaviour, counts, live, says


@contextmanager
def logged(level: int = logging.INFO) -> Iterator[list[dict[str, Any]]]:
    """JSON log lines of the server; complete when the block has ended."""
    text, lines = io.StringIO(), list[dict[str, Any]]()
    log, handler = logging.getLogger("ridgeline"), logging.StreamHandler(text)
    handler.setFormatter(JsonFormatter())
    before = log.level
    log.addHandler(handler)
    log.setLevel(level)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
        lines += map(json.loads, text.getvalue().splitlines())


def test_errors_have_the_id(polite: Live) -> None:
    named = {"x-request-id": "mine"}
    refused = polite.chat(headers=named, temperature=9)
    assert refused.status == 400 and refused.json["request_id"] == refused.headers["x-request-id"] == "mine"
    message = {"model": "tiny-test", "max_tokens": 0, "messages": []}
    anthropic = polite.send("POST", "/v1/messages", message, named)
    assert anthropic.json["type"] == "error" and anthropic.json["request_id"] == "mine"
    unknown = polite.send("POST", "/v2/chat", {}, {"x-request-id": "not valid\t"})
    assert unknown.status == 404 and unknown.json["request_id"] == unknown.headers["x-request-id"]
    assert unknown.json["request_id"].startswith("req_")


def test_a_stream_that_fails_ends_with_the_id() -> None:
    with live(behaviour(counts, fail_after=3)) as server:
        answer = server.chat(headers={"x-request-id": "mine"}, stream=True)
    last = answer.data.decode().strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["request_id"] == "mine"


def test_each_line_of_a_request_has_its_id() -> None:
    """Requests run at the same time in one process; every line is of the right one."""
    with logged() as lines, live(behaviour(counts, fail_after=30)) as server:

        def call(number: int) -> None:
            server.chat(headers={"x-request-id": f"call-{number}"}, stream=True)

        threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number in range(4):
        of_call = [line for line in lines if line.get("request_id") == f"call-{number}"]
        assert [line["logger"] for line in of_call] == ["ridgeline.service.answer", "ridgeline.service.guard"]
        assert of_call[0]["level"] == "warning" and "ended early" in of_call[0]["message"]
        access = of_call[1]
        assert (access["method"], access["path"], access["status"]) == ("POST", "/v1/chat/completions", 200)
        assert access["seconds"] > 0 and access["message"].startswith("POST /v1/chat/completions 200 in ")


def test_reads_are_logged_at_the_lowest_level_and_ids_of_bodies_count() -> None:
    with logged() as lines, live(behaviour(says("Hello"))) as server:
        server.get("/health")
        server.chat(request_id="from-the-body")
    assert [line["request_id"] for line in lines if line["logger"] == "ridgeline.service.guard"] == ["from-the-body"]
