"""Clients of a chaos run: they know every answer, and judge how each request ends."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import aiohttp

TIMEOUT_S = 75.0
"""A request that has no end by then is lost."""
ANSWERED, ERROR, CUT, LOST, TWICE, WRONG = "answered", "clear error", "cut off", "lost", "twice", "wrong"
"""Ends of a request: its whole answer; an error with a message, after a part of a stream or instead of an answer; the end of its
connection; none; two of them; another answer."""

LONG = 10
"""Prompts that together need more blocks than an engine has: cached ones move to host memory and to files."""
WORDS = "the small old red bird house river train child winter garden song light door stone tells finds sees opens and of".split()


@dataclass(frozen=True, slots=True)
class Question:
    path: str
    body: dict[str, Any]


def questions() -> list[Question]:
    """Prompts of both endpoints, as streams and as one body. Temperature 0 and float32 make each answer the same at any time."""
    fixed = {"temperature": 0, "ignore_eos": True}
    chance = random.Random(1)
    texts = ["Once upon a time", "The engine of the old train"]
    texts += [" ".join(chance.choice(WORDS) for _ in range(90)) for _ in range(LONG)]
    asked = []
    for number, text in enumerate(texts):
        for stream in (False, True):
            body = {"max_tokens": 12 + 10 * (number % 4), "stream": stream, **fixed}
            asked.append(Question("/v1/completions", {"prompt": text, **body}))
            message = {"role": "user", "content": text}
            asked.append(Question("/v1/chat/completions", {"messages": [message], **body}))
    return asked


def text_of(choice: dict[str, Any]) -> str:
    """Of a completion, a message or a piece of either."""
    return choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""


def judge(expected: str, status: int, data: bytes, stream: bool) -> tuple[str, str]:
    """How a complete HTTP answer ends a request, and details of a bad end. expected: the text of its answer."""
    if status != 200:
        try:
            error = json.loads(data)["error"]
        except (ValueError, KeyError, TypeError):
            return LOST, f"status {status} without an error: {data[:100]!r}"
        return (ERROR, error["message"]) if error.get("message") and error.get("type") else (LOST, str(error))
    if not stream:
        try:
            text = text_of(json.loads(data)["choices"][0])
        except (ValueError, KeyError, IndexError):
            return LOST, f"no JSON: {data[-100:]!r}"
        return (ANSWERED, "") if text == expected else (WRONG, text)
    return _judge_events(expected, data)


def _judge_events(expected: str, data: bytes) -> tuple[str, str]:
    text, ends, message = "", [], ""
    for event in data.split(b"\n\n"):
        line = next((line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")), b"")
        if line == b"[DONE]":
            ends.append(ANSWERED)
        elif line:
            try:
                value = json.loads(line)
            except ValueError:
                continue  # a piece that was cut off: the end says so
            if "error" in value:
                ends.append(ERROR)
                message = value["error"]["message"]
            elif value.get("choices"):
                text += text_of(value["choices"][0])
    if not ends:
        return LOST, f"a stream without an end: {data[-100:]!r}"
    if len(ends) > 1 or len(text) > len(expected):
        return TWICE, f"{ends}, {text!r}"
    right = text == expected if ends == [ANSWERED] else expected.startswith(text)
    return (ends[0], message) if right else (WRONG, text)


@dataclass
class Load:
    """Clients that send one request after the other. url: of the service."""

    url: str
    asked: Sequence[Question] = field(default_factory=questions)
    pause_s: float = 0.0
    """Of each client between two requests."""
    ended: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    """Connections that nobody accepted: no request was sent."""
    errors: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    cuts: list[tuple[float, float, str]] = field(default_factory=list)
    """Start, end and reason of requests whose connection ended."""
    seconds: list[float] = field(default_factory=list)
    expected: dict[int, str] = field(default_factory=dict)

    async def __aenter__(self) -> Load:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self._tasks: list[asyncio.Task[None]] = []
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        await self._session.close()

    @property
    def requests(self) -> int:
        """Accepted requests that have ended."""
        return sum(self.ended.values())

    async def learn(self) -> None:
        """Ask every question once, of a service that nothing disturbs."""
        for number, question in enumerate(self.asked):
            status, data, _ = await self._post(question, f"learn-{number}")
            assert status == 200, data
            if question.body["stream"]:
                events = [json.loads(line[5:]) for line in data.split(b"\n\n") if line.startswith(b"data: {")]
                self.expected[number] = "".join(text_of(event["choices"][0]) for event in events if event["choices"])
            else:
                self.expected[number] = text_of(json.loads(data)["choices"][0])
            assert self.expected[number]

    def start(self, clients: int, seed: int) -> None:
        self._running = True
        self._tasks = [
            asyncio.ensure_future(self._client(number, random.Random(seed + number))) for number in range(clients)
        ]

    async def stop(self) -> None:
        """Let every request come to its end."""
        self._running = False
        await asyncio.gather(*self._tasks)

    async def _client(self, client: int, chance: random.Random) -> None:
        count = 0
        while self._running:
            await self.ask(chance.randrange(len(self.asked)), f"chaos-{client}-{count}")
            count += 1
            await asyncio.sleep(self.pause_s * chance.uniform(0.5, 1.5))

    async def ask(self, number: int, name: str) -> str:
        """Send one request and count its end."""
        question, began, wait_s = self.asked[number], time.monotonic(), 0.0
        try:
            async with asyncio.timeout(TIMEOUT_S):
                status, data, wait_s = await self._post(question, name)
            end, detail = judge(self.expected[number], status, data, question.body["stream"])
        except TimeoutError:
            end, detail = LOST, f"no end after {TIMEOUT_S:g} s"
        except aiohttp.ClientConnectorError:
            self.refused += 1
            await asyncio.sleep(0.1)
            return "refused"
        except (aiohttp.ClientError, OSError) as error:
            end, detail = CUT, repr(error)
            self.cuts.append((began, time.monotonic(), f"{name}: {detail}"))
        self.ended[end] += 1
        self.seconds.append(took := time.monotonic() - began)
        if end == ERROR:
            await asyncio.sleep(wait_s)
            self.errors[detail.split("(")[0].split(":")[0].strip()[:60]] += 1
        elif end not in (ANSWERED, CUT):
            self.bad.append(f"{name} after {took:.1f} s: {end}: {detail}")
        return end

    async def _post(self, question: Question, name: str) -> tuple[int, bytes, float]:
        """Status, body, and the seconds that the client is asked to wait before another request."""
        headers, body = {"x-request-id": name}, question.body
        if crc32(name.encode()) % 2:  # no prefix of it is cached: the caches on disk have something to write
            body = body | {"cache_salt": name}
        async with self._session.post(self.url + question.path, json=body, headers=headers) as reply:
            data, wait_s = await reply.read(), min(2.0, float(reply.headers.get("retry-after", 0)))
            if reply.headers.get("x-request-id") != name:
                return 0, b"the answer to another request: " + data, wait_s
            return reply.status, data, wait_s
