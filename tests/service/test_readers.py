"""Which requests have a reader, and what `ridgeline serve --reader-pace` does for those that come after them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from ridgeline.bench.server_process import serving

from .live import Live, behaviour, live, says

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("route", "fields", "has_reader"),
    [
        ("complete", {"stream": True}, True),
        ("complete", {}, False),
        ("complete", {"stream": True, "guided_choice": ["yes", "no"]}, False),
        ("chat", {"stream": True}, True),
        ("chat", {"stream": False}, False),
        ("chat", {"stream": True, "response_format": {"type": "json_object"}}, False),
    ],
)
def test_who_has_a_reader(route: str, fields: dict[str, Any], has_reader: bool) -> None:
    with live(behaviour(says("Yes.")), chat_template=PLAIN) as server:
        assert getattr(server, route)(**fields).status == 200
        assert server.engine.submits[-1].has_reader is has_reader


def test_tools_are_for_programs_and_hidden_thoughts_are_not_read(polite: Live, thoughtful: Live) -> None:
    assert polite.chat(stream=True, tools=TOOLS).status == 200
    assert not polite.engine.submits[-1].has_reader
    for shown in (False, True):
        assert thoughtful.chat(stream=True, include_reasoning=shown).status == 200
        assert thoughtful.engine.submits[-1].has_reader is shown
    assert thoughtful.chat(stream=True).status == 200
    assert not thoughtful.engine.submits[-1].has_reader


async def events(session: aiohttp.ClientSession, url: str, **fields: Any) -> AsyncIterator[str]:
    body = {"temperature": 0.8, "seed": 5, "ignore_eos": True, "stream": True, **fields}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200
        async for line in response.content:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])["choices"][0]["text"]


async def read(session: aiohttp.ClientSession, url: str, started: asyncio.Event, **fields: Any) -> tuple[str, float]:
    """The text of a stream, and its longest pause. Sets `started` when a sixth of it is there."""
    text, pause, last = "", 0.0, 0.0
    async for piece in events(session, url, **fields):
        now = time.monotonic()
        pause, last = max(pause, now - last) if text else 0.0, now
        text += piece
        if len(text) > fields["max_tokens"] // 2:
            started.set()
    return text, pause


async def scenario() -> None:
    flags = ("--device", "cpu", "--threads", "1", "--deterministic", "--max-num-batched-tokens", "32")
    reader = {"prompt": "Once upon a time", "max_tokens": 300}
    async with serving([*flags, "--reader-pace", "100s"]) as url, aiohttp.ClientSession() as session:
        async with session.post(
            f"{url}/v1/completions", json={**reader, "temperature": 0.8, "seed": 5, "ignore_eos": True}
        ) as answer:
            alone = (await answer.json())["choices"][0]["text"]
        started = asyncio.Event()
        reading = asyncio.create_task(read(session, url, started, **reader))
        await started.wait()
        sent = time.monotonic()
        async for _ in events(session, url, prompt=[7, 8, 9] * 500, max_tokens=1):
            break
        waited = time.monotonic() - sent
        text, pause = await reading
    assert text == alone
    assert pause > 0.5 * waited, "the prompt took the steps of the reader, who was ahead"


@pytest.mark.long
def test_a_stream_ahead_of_its_reader_waits_for_a_prompt_and_ends_with_the_same_text() -> None:
    asyncio.run(scenario())
