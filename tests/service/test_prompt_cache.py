"""`cache_control` through HTTP with the real engine, and what usage, /requests and /metrics say of it."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from ridgeline.core.config import EngineConfig, ServiceConfig

from .live import MODEL, Live
from .real import real_server, write_checkpoint

BOOK = "It was the best of times. " * 6
EPHEMERAL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
WARM = list(range(10, 60))
PAGE_BYTES = 2 * 2 * 2 * 16 * 4 * 16
"""Of 16 tokens: 2 layers, keys and values, 2 heads of 16 numbers in float32."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A cache of 60 blocks, of which 30 may be pinned and three are at the start."""
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder)
    (folder / "prefixes.jsonl").write_text(json.dumps({"prompt": WARM, "cache_salt": "warm"}))
    config = ServiceConfig(
        port=0,
        served_model_name=MODEL,
        drain_s=1.0,
        token_prices="input=1,output=2,storage=0.5",
        warm_prefix=str(folder / "prefixes.jsonl"),
    )
    engine = EngineConfig(
        device="cpu", max_num_seqs=4, threads=1, block_size=16, kv_cache_memory=61 * PAGE_BYTES, cache_pin_share=0.5
    )
    with real_server(folder, config, engine) as running:
        yield running


def part(text: str, control: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "text", "text": text, **({"cache_control": control} if control else {})}


def usage(server: Live, salt: str, *parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": list(parts)}]
    reply = server.chat(messages=messages, cache_salt=salt, max_tokens=2, ignore_eos=True, **fields)
    assert reply.status == 200, reply.data
    assert "x-ridgeline-ignored-fields" not in reply.headers
    content: dict[str, Any] = reply.json["usage"]
    return content


def count(server: Live, name: str, **labels: str) -> float:
    """A counter's value; 0 before it has one."""
    text = server.get("/metrics").data.decode()
    lines = [line for line in text.splitlines() if line.startswith(f"ridgeline:{name}")]
    lines = [line for line in lines if all(f'{label}="{value}"' in line for label, value in labels.items())]
    return float(lines[0].rsplit(" ", 1)[1]) if lines else 0.0


def warm_tokens(server: Live) -> int:
    """Cached tokens of a prompt with the warm prefix."""
    answer = server.complete(prompt=[*WARM, 5, 6, 7], cache_salt="warm", max_tokens=1).json
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_a_warm_prefix_is_there_before_the_first_request(server: Live) -> None:
    assert server.get("/admin/stats").json["pinned"] == 3
    assert warm_tokens(server) == 48


def test_a_breakpoint_writes_then_reads_and_usage_prices_both(server: Live) -> None:
    first = usage(server, "a", part(BOOK, EPHEMERAL), part("Who?"))
    (pin,) = first["prompt_cache"]
    written = pin["tokens"]
    assert written % 16 == 0 and 100 <= written <= len(BOOK) + 20
    assert pin == {"tokens": written, "ttl": "5m", "state": "written", "reason": None, "lost": None}
    assert first["prompt_tokens_details"] == {
        "cached_tokens": 0,
        "cache_write_tokens": written,
        "cache_write_details": {"ephemeral_5m_tokens": written, "ephemeral_1h_tokens": 0},
    }
    computed = first["prompt_tokens"] - written
    storage = 0.5 * written * 300 / 3600
    assert first["billed"]["input_tokens"] == pytest.approx(computed + 1.25 * written + storage)
    second = usage(server, "a", part(BOOK, EPHEMERAL), part("When?"))
    details = second["prompt_tokens_details"]
    assert details["cached_tokens"] >= written and details["cache_write_tokens"] == 0
    assert second["prompt_cache"][0]["state"] == "renewed"
    computed, cached = second["prompt_tokens"] - details["cached_tokens"], details["cached_tokens"]
    storage = second["billed"]["input_tokens"] - computed - 0.1 * cached
    assert 0 < storage < 0.5 * written * 60 / 3600, "it pays for the seconds since the first request"
    dollars = (second["billed"]["input_tokens"] * 1 + 2 * 2) / 1e6
    assert second["billed"]["usd"] == pytest.approx(dollars)
    (row,) = server.get("/requests?limit=1").json["data"]
    assert row["billed"] == second["billed"] and row["cache_writes"] == {}
    assert count(server, "prompt_cache_write_tokens_total", ttl="5m") == written


def test_breakpoints_on_tools_messages_and_the_body(server: Live) -> None:
    tool = {"type": "function", "function": {"name": "look", "description": "Look it up. " * 5}}
    messages = [
        {"role": "system", "content": "Be brief.", "cache_control": HOUR},
        {"role": "user", "content": "hello there, how are you doing this fine morning?"},
    ]
    fields: dict[str, Any] = {
        "tools": [{**tool, "cache_control": HOUR}],
        "messages": messages,
        "cache_control": EPHEMERAL,
    }
    reply = server.chat(cache_salt="t", max_tokens=1, **fields)
    assert reply.status == 200, reply.data
    tools, system, everything = reply.json["usage"]["prompt_cache"]
    assert (tools["ttl"], system["ttl"], everything["ttl"]) == ("1h", "1h", "5m")
    assert 0 < tools["tokens"] <= system["tokens"] < everything["tokens"] <= reply.json["usage"]["prompt_tokens"]
    bare = server.chat(cache_salt="t", max_tokens=1, tools=[tool], messages=messages).json["usage"]
    assert bare["prompt_tokens"] == reply.json["usage"]["prompt_tokens"], "the template does not see cache_control"
    assert bare["prompt_tokens_details"]["cached_tokens"] >= everything["tokens"] - 16
    messages[1]["content"] = "something else"
    changed = server.chat(cache_salt="t", max_tokens=1, **fields).json["usage"]
    assert changed["prompt_tokens_details"]["cached_tokens"] == system["tokens"]


def test_completions_say_how_much_of_the_prompt(server: Live) -> None:
    ids = list(range(10, 90))
    answer = server.complete(prompt=ids, max_tokens=1, cache_salt="c", cache_control={**HOUR, "tokens": 50}).json[
        "usage"
    ]
    assert answer["prompt_cache"][0]["tokens"] == 48
    assert answer["prompt_tokens_details"]["cache_write_details"]["ephemeral_1h_tokens"] == 48
    answer = server.complete(
        prompt=BOOK, max_tokens=1, cache_salt="c", cache_control={**EPHEMERAL, "characters": 40}
    ).json["usage"]
    assert answer["prompt_cache"][0]["tokens"] in (16, 32)
    for body, word in (
        ({"prompt": ["a", "b"], "cache_control": EPHEMERAL}, "one prompt"),
        ({"prompt": [1, 2], "cache_control": {**EPHEMERAL, "characters": 1}}, "tokens instead"),
        ({"prompt": "ab", "cache_control": {**EPHEMERAL, "tokens": 1000}}, "at most"),
        ({"prompt": "ab", "cache_control": {**EPHEMERAL, "tokens": 1, "characters": 1}}, "one of them"),
    ):
        reply = server.complete(**body)
        assert reply.status == 400 and word in reply.error["message"]
        assert reply.error["param"].startswith("cache_control")


def test_streams_report_the_same_usage(server: Live) -> None:
    assert server.send("POST", "/reset_prefix_cache").status == 200
    messages = [{"role": "user", "content": [part(BOOK, EPHEMERAL)]}]
    options = {"include_usage": True}
    events = server.chat(messages=messages, cache_salt="s", max_tokens=2, stream=True, stream_options=options).events
    assert events[-1]["usage"]["prompt_cache"][0]["state"] == "written"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user", "content": [part("a", {"type": "x"})]}], "messages[0].content[0].cache_control.type"),
        ([{"role": "user", "content": "a", "cache_control": {"ttl": "5m"}}], "messages[0].cache_control"),
        (
            [{"role": "user", "content": [part("a", {**EPHEMERAL, "ttl": "2h"})]}],
            "messages[0].content[0].cache_control.ttl",
        ),
        ([{"role": "user", "content": [part("a", EPHEMERAL)] * 5}], "messages[0].content[4].cache_control"),
        (
            [{"role": "user", "content": [part(BOOK, EPHEMERAL), part(BOOK, HOUR)]}],
            "messages[0].content[1].cache_control.ttl",
        ),
        (
            [{"role": "user", "content": [{**part("a"), "prompt_cache_breakpoint": {"mode": "explicit"}}]}],
            "messages[0].content[0].prompt_cache_breakpoint",
        ),
    ],
)
def test_wrong_breakpoints_are_refused_by_name(server: Live, messages: list[Any], param: str) -> None:
    reply = server.chat(messages=messages)
    assert reply.status == 400
    assert reply.error["param"] == param


def test_the_budget_refuses_with_a_reason(server: Live) -> None:
    assert server.send("POST", "/reset_prefix_cache").status == 200
    before = count(server, "prompt_cache_pins_refused_total", reason="budget")
    big = list(range(100)) * 4
    answer = server.complete(prompt=big, max_tokens=1, cache_salt="b", cache_control=EPHEMERAL).json["usage"]
    assert answer["prompt_cache"][0]["state"] == "written"
    answer = server.complete(prompt=big, max_tokens=1, cache_salt="other", cache_control=EPHEMERAL).json["usage"]
    assert answer["prompt_cache"][0] == {
        "tokens": 400,
        "ttl": "5m",
        "state": "refused",
        "reason": "budget",
        "lost": None,
    }
    assert answer["prompt_tokens_details"] | {"cache_write_details": None} == {
        "cached_tokens": 0,
        "cache_write_tokens": 0,
        "cache_write_details": None,
    }, "another salt shares nothing, and what is not pinned is not billed as a write"
    assert server.get("/admin/stats").json["pinned"] == 25
    assert count(server, "prompt_cache_pins_refused_total", reason="budget") == before + 1
    assert count(server, "prompt_cache_pinned_blocks") == 25


def test_a_lost_prefix_is_told_with_its_reason(server: Live) -> None:
    """Lost by a reset of the cache, by running requests that need the blocks, and with the engine."""
    assert server.send("POST", "/reset_prefix_cache").status == 200

    def lost() -> Any:
        return usage(server, "l", part(BOOK, EPHEMERAL))["prompt_cache"][0]["lost"]

    assert lost() is None
    assert server.send("POST", "/reset_prefix_cache").status == 200
    assert lost() == "reset"
    reply = server.complete(
        prompt=[[number] * 250 for number in (40, 41)], max_tokens=230, ignore_eos=True, temperature=0
    )
    assert reply.status == 200
    assert lost() == "pressure"
    assert lost() is None
    assert count(server, "prompt_cache_pins_lost_total", reason="pressure") >= 1
    os.kill(server.engine.process.pid, signal.SIGKILL)
    server.until(lambda: server.server.front.trouble is not None, timeout=10)
    server.until(lambda: server.server.front.trouble is None, timeout=40)
    assert warm_tokens(server) == 48, "a new engine computes it first"
    assert lost() == "restart"
    assert lost() is None
    assert count(server, "prompt_cache_pins_lost_total", reason="restart") == 1


def test_the_options_of_openai_name_cache_control(server: Live) -> None:
    for fields in ({"prompt_cache_retention": "24h"}, {"prompt_cache_options": {"ttl": "30m"}}):
        reply = server.chat(**fields)
        assert reply.status == 400
        assert re.search("cache_control", reply.error["message"])
