"""Hundreds of hostile grammars at once: memory stays bounded, and a neighbour's stream goes on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ..service.live import Reply
from .served import Served, refused, served

AT_ONCE = 12
MORE_BYTES = 200 << 20
"""Bytes by which either process may have grown at the end."""
LONGER_S = 0.1
"""Seconds by which the longest gap in a neighbour's stream may exceed that under as many honest requests."""


def hostile(number: int) -> dict[str, Any]:
    """A request whose grammar is expensive, no two alike: ten kinds in turn."""
    pattern = f"((x{{60}}){{60}}){{{60 + number}}}"
    parameters = {"type": "object", "properties": {"q": {"type": "string", "pattern": pattern}}, "required": ["q"]}
    doubling = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(1, 60))
    intersected = [{"type": "string", "pattern": f".*{123456789 + i * 7654321 + number}.{{20}}"} for i in range(24)]
    kinds: tuple[dict[str, Any], ...] = (
        {"guided_json": {"allOf": intersected}},
        {"guided_json": {"type": "integer", "multipleOf": 999983 + 2 * number}},
        {"structured_outputs": {"regex": f"(((a{{50}}){{50}}){{50}}){{{50 + number}}}"}},
        {"guided_regex": rf"(((\w{{30}}){{30}}){{30}}){{{30 + number}}}"},
        {"guided_json": parameters},
        {"guided_grammar": f'start: r1\n{doubling}\nr60: "a{number}"?'},
        {"guided_grammar": rf"start: /(.|\n)*a(.|\n){{{50 + number}}}(b|c(.|\n)*){{30}}/"},
        {"guided_regex": f".*(a.{{1,20}}b|b.{{1,30}}c|c.{{1,{25 + number}}}a).*x.{{100}}"},
        {"guided_grammar": f'start: "a{number}"{{1000000}}'},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]},
    )
    return kinds[number % len(kinds)]


def ask(server: Served, fields: dict[str, Any]) -> Reply:
    fields = {"max_tokens": 60, **fields}
    return server.chat("hi", **fields) if "tools" in fields else server.complete("x", **fields)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


class Neighbour(threading.Thread):
    """Streams one answer after the other, and notes the seconds between two events."""

    def __init__(self, server: Served) -> None:
        super().__init__()
        self._server = server
        self.over = threading.Event()
        self.gaps: list[float] = []
        self.ends: list[str] = []

    def run(self) -> None:
        while not self.over.is_set():
            sock = self._server.begin(prompt="Once upon a time", max_tokens=400, ignore_eos=True, stream=True)
            data, last = b"", None
            while part := sock.recv(1 << 16):
                now = time.monotonic()
                if last is not None:
                    self.gaps.append(now - last)
                data, last = data + part, now
            sock.close()
            self.ends.append("done" if b"data: [DONE]" in data else data[-300:].decode())


@contextmanager
def beside(server: Served) -> Iterator[Neighbour]:
    neighbour = Neighbour(server)
    neighbour.start()
    try:
        yield neighbour
    finally:
        neighbour.over.set()
        neighbour.join()
    assert set(neighbour.ends) == {"done"}


def send_all(server: Served, requests: list[dict[str, Any]]) -> list[Reply]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda fields: ask(server, fields), requests))


def check(replies: list[Reply]) -> None:
    """Followed as far as max_tokens, or refused in words of ours; on a busy machine some find too many before them."""
    for reply in replies:
        if reply.status not in (200, 429):
            refused(reply)
            assert reply.error["code"] == "invalid_grammar" and " is too large: " in reply.error["message"]


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("hostile"), "--max-num-seqs", "16", "--max-model-len", "512") as running:
        yield running


@pytest.mark.long
@pytest.mark.parametrize("count", [10, 200])
def test_hostile_grammars_leave_memory_and_blocks_as_they_were(roomy: Served, count: int) -> None:
    ask(roomy, {"guided_regex": "[a-z]{5}"})  # what every grammar needs is loaded
    pids = (roomy.process.pid, roomy.engine_pid)
    before = [resident_bytes(pid) for pid in pids]
    with beside(roomy):
        replies = send_all(roomy, [hostile(1000 * count + number) for number in range(count)])
    check(replies)
    assert {400} <= {reply.status for reply in replies} <= {200, 400, 429}
    stats = roomy.rest()
    assert ask(roomy, {"guided_regex": "[a-z]{4}"}).status == 200, "an honest one is followed as before"
    assert stats["used"] == 0 and roomy.send("GET", "/health").status == 200
    for pid, bytes_before in zip(pids, before, strict=True):
        assert resident_bytes(pid) - bytes_before < MORE_BYTES


def test_a_refusal_is_remembered(server: Served) -> None:
    """The second answer comes from the verdict alone: the service has grown by nothing, whatever is sent how often."""
    bomb = {"structured_outputs": {"regex": "(((a{50}){50}){50}){49}"}}
    first = ask(server, bomb)
    started = time.process_time()
    again = send_all(server, [bomb] * 24)
    errors = [json.loads(reply.data)["error"] for reply in (first, *again)]
    assert all(error == errors[0] for error in errors) and {reply.status for reply in (first, *again)} == {400}
    assert errors[0]["param"] == "structured_outputs"
    assert time.process_time() - started < 30


@pytest.mark.long
def test_a_neighbours_stream_goes_on(roomy: Served) -> None:
    """Its longest gap beside hostile grammars is at most 100 ms longer than beside as many honest requests."""

    def longest_gap(requests: list[dict[str, Any]]) -> float:
        with beside(roomy) as neighbour:
            send_all(roomy, requests)
        return max(neighbour.gaps)

    more = []
    for attempt in range(3):  # another program on the machine may hold up one of them
        honest = longest_gap([{"seed": number} for number in range(100)])
        beside_hostile = longest_gap([hostile(10_000 * (attempt + 1) + number) for number in range(100)])
        more.append(beside_hostile - honest)
        if more[-1] < LONGER_S:
            return
    raise AssertionError(f"gaps are {more} s longer")
