"""The answer cache: identical deterministic requests get the stored answer, and the engine does not see them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from ridgeline.core.plan import TokenLogprobs
from ridgeline.core.sampling import SamplingParams
from ridgeline.service.answer_cache import AnswerCache, answer_key
from ridgeline.service.breakpoints import Breakpoint
from ridgeline.service.call import Call
from ridgeline.service.piece import Piece, Scored

from .live import Live, behaviour, counts, live

CALL = Call("a", 1.0, ([1, 2], [3]), SamplingParams(temperature=0.0, max_tokens=5), 5)
PIECE = Piece(0, "hé", 2, "stop", [Scored(0, TokenLogprobs(5, -0.5, 1, (5, 6), (-0.5, -1.0), 2.0))], None, 7)


@pytest.fixture
def server() -> Iterator[Live]:
    with live(behaviour(counts), answer_cache_mb=1.0, token_prices="input=1,output=1") as running:
        yield running


def submits(server: Live) -> int:
    return len(server.engine.submits)


def test_an_answer_is_repeated_with_its_price(server: Live) -> None:
    first, second = (server.chat(temperature=0, max_tokens=6).json for _ in range(2))
    assert submits(server) == 1
    assert second["choices"] == first["choices"] and second["id"] != first["id"]
    assert "answer_cached" not in first["usage"] and second["usage"]["answer_cached"] is True
    prompt, output = first["usage"]["prompt_tokens"], first["usage"]["completion_tokens"]
    assert (second["usage"]["prompt_tokens"], second["usage"]["completion_tokens"]) == (prompt, output)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == prompt
    assert second["usage"]["billed"]["usd"] == pytest.approx(0.1 * (prompt + output) / 1e6)
    row, before = server.get("/requests?limit=2").json["data"]
    assert row["answer_cached"] and not before["answer_cached"]
    assert row["finish_reasons"] == before["finish_reasons"] == ["length"]
    assert row["cost"] == row["spent"]["device_s"] == 0 and row["cut"] == ""
    text = server.get("/metrics").data.decode()
    for name, value in (("hits", 1), ("misses", 1)):
        (line,) = [line for line in text.splitlines() if line.startswith(f"ridgeline:answer_cache_{name}_total")]
        assert float(line.rsplit(" ", 1)[1]) == value


def test_streams_repeat_their_events(server: Live) -> None:
    def events(**fields: Any) -> list[Any]:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = server.complete(seed=3, max_tokens=9, n=2, stream=True, stream_options=options, **fields).events
        counts = [event["usage"]["completion_tokens"] for event in body]
        assert counts == sorted(counts) and counts[-1] == 18
        return [event["choices"] for event in body]

    first = events(logprobs=2)
    assert events(logprobs=2) == first
    assert submits(server) == 1
    whole = server.complete(seed=3, max_tokens=9, n=2, logprobs=2).json
    assert submits(server) == 1, "a body is made of the same pieces"
    assert "".join(choice["text"] for choice in whole["choices"])
    assert events() != first and submits(server) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 1},
        {"cache_salt": "other"},
        {"max_tokens": 4},
        {"messages": [{"role": "user", "content": "ho"}]},
        {"top_k": 5},
        {"logprobs": True},
        {"cache_control": {"type": "ephemeral"}},
    ],
    ids=str,
)
def test_another_request_is_computed(server: Live, change: dict[str, Any]) -> None:
    server.chat(temperature=0, max_tokens=6)
    for _ in range(2):
        reply = server.chat(**{"temperature": 0, "max_tokens": 6, "logprobs": False, **change})
        assert reply.status == 200
    stored = change not in ({"temperature": 1}, {"cache_control": {"type": "ephemeral"}})
    assert submits(server) == (2 if stored else 3)


def test_nothing_is_stored_of_a_request_that_failed_or_was_left() -> None:
    with live(behaviour(counts, fail_after=2), answer_cache_mb=1.0) as server:
        for _ in range(2):
            assert server.chat(temperature=0, max_tokens=6).status == 500
        assert submits(server) == 2
    with live(behaviour(counts, delay=0.02), answer_cache_mb=1.0) as server:
        connection = server.connect()
        body = b'{"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 50, "stream": true}'
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        connection.getresponse().read(40)
        connection.close()
        server.until(lambda: server.engine.cancels)
        assert server.server.front.service().answers.bytes == 0


@pytest.mark.parametrize("change", ["unload_lora_adapter", "update_weights_from_disk"])
def test_an_answer_that_ends_after_a_change_of_the_weights_is_not_repeated(change: str) -> None:
    """Requests of an adapter go on when it is unloaded, and store what it has said when another one may have its name."""
    with live(behaviour(counts, delay=0.05), answer_cache_mb=1.0) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.chat, temperature=0, max_tokens=6)
        server.until(lambda: server.engine.submits)
        if change == "unload_lora_adapter":
            assert server.send("POST", "/v1/unload_lora_adapter", {"lora_name": "x"}).status == 200
        else:
            body = {"model_path": "x", "abort_all_requests": True}
            assert server.send("POST", "/update_weights_from_disk", body).status == 200
        running.result()
        server.chat(temperature=0, max_tokens=6)
        assert submits(server) == 2
        server.chat(temperature=0, max_tokens=6)
        assert submits(server) == 2


def test_without_the_option_nothing_is_stored() -> None:
    with live(behaviour(counts)) as server:
        for _ in range(2):
            server.chat(temperature=0, max_tokens=6)
        assert submits(server) == 2


def test_bytes_are_bounded_and_the_least_recently_used_answer_goes_first() -> None:
    size = AnswerCache(1 << 20)
    size.put(b"a", [PIECE])
    cache = AnswerCache(3 * size.bytes)
    for key in (b"a", b"b", b"c"):
        cache.put(key, [PIECE])
    assert cache.get(b"a") == [PIECE]
    cache.put(b"d", [PIECE])
    assert cache.get(b"b") is None and cache.get(b"a") is not None
    assert cache.bytes == 3 * size.bytes
    cache.put(b"d", [PIECE])
    assert cache.bytes == 3 * size.bytes
    cache.put(b"e", [PIECE] * 4)
    assert cache.get(b"e") is None and cache.bytes == 3 * size.bytes


def test_the_key_covers_all_that_decides_the_answer() -> None:
    calls = [
        CALL,
        replace(CALL, prompts=([1], [2, 3])),
        replace(CALL, salt="b"),
        replace(CALL, sampling=SamplingParams(temperature=0.0, max_tokens=6)),
        replace(CALL, sampling=SamplingParams(temperature=1.0, max_tokens=5, seed=1)),
        replace(CALL, sampling=SamplingParams(temperature=0.0, max_tokens=5, logprobs=1)),
        replace(CALL, continues=True),
    ]
    assert len({answer_key(call) for call in calls} - {None}) == len(calls)
    assert answer_key(replace(CALL, id="z", arrival=9.0, priority=3)) == answer_key(CALL)
    assert answer_key(replace(CALL, sampling=SamplingParams(max_tokens=5))) is None
    assert answer_key(replace(CALL, breakpoints=(Breakpoint(1, "5m"),))) is None
