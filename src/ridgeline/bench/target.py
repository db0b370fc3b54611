"""The server under load: its address, the requests that it accepts, and the connections to it."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import msgspec

from ridgeline.bench.clock import resolve_future
from ridgeline.bench.stream import Connection, Reply
from ridgeline.core.errors import ConfigError
from ridgeline.core.reach import reason

IDLE_S = 2.0
"""Connections that are idle for longer are not reused. Servers close idle connections after some seconds, and a request sent
at that moment would count as a server error."""
_MAX_IDLE = 4096


@dataclass(frozen=True, slots=True)
class Address:
    """A server's address."""

    url: str
    """For example "http://host:port". A path is allowed, and a trailing /v1 is ignored."""
    api_key: str | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self._full)
        try:
            named = bool(parts.hostname) and not any(letter.isspace() for letter in self.url)
            valid = parts.scheme in ("http", "https") and named and (parts.port or 1) > 0
        except ValueError:
            valid = False
        if not valid:
            raise ConfigError(f"{self.url!r} is not the address of a server: give http://HOST:PORT.", param="url")

    @property
    def _full(self) -> str:
        return self.url if "://" in self.url else f"http://{self.url}"

    @property
    def secure(self) -> bool:
        return urlsplit(self._full).scheme == "https"

    @property
    def host(self) -> str:
        return urlsplit(self._full).hostname or ""

    @property
    def port(self) -> int:
        return urlsplit(self._full).port or (443 if self.secure else 80)

    def request(self, path: str, body: bytes | None, name: str = "", run_id: str = "") -> bytes:
        """Encode an HTTP request: POST with a body, GET without. name: value of x-request-id. run_id: value of x-run-id."""
        base = urlsplit(self._full).path.rstrip("/").removesuffix("/v1")
        lines = [f"{'GET' if body is None else 'POST'} {base}{path} HTTP/1.1", f"host: {self.host}:{self.port}"]
        if self.api_key:
            lines.append(f"authorization: Bearer {self.api_key}")
        if name:
            lines.append(f"x-request-id: {name}")
        if run_id:
            lines.append(f"x-run-id: {run_id}")
        if body is not None:
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


ROLES = ("user", "assistant")


@dataclass(frozen=True, slots=True)
class Dialect:
    """The form of requests that a server accepts."""

    model: str
    chat: bool = False
    """Use /v1/chat/completions instead of /v1/completions."""
    ids: bool = True
    """Send prompts as token ids."""
    usage: str = "each"
    """Chunks with token counts: "each", only the "last", or "no"."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every request body."""
    context: int | None = None
    """Most tokens of prompt plus answer. None: the server does not report it."""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, prompt: str | tuple[str, ...] | msgspec.Raw, output: int) -> bytes:
        """Encode the JSON body of a request for `output` tokens.

        A tuple is a conversation in which user and assistant alternate. For completions its turns are joined to one text.
        """
        turns = prompt if isinstance(prompt, tuple) else (prompt,)
        body: dict[str, Any] = {"model": self.model, "max_tokens": output, "stream": True, **self.fields}
        if self.usage != "no":
            body["stream_options"] = {"include_usage": True}
            if self.usage == "each":
                body["stream_options"]["continuous_usage_stats"] = True
        if self.chat:
            body["messages"] = [{"role": ROLES[index % 2], "content": turn} for index, turn in enumerate(turns)]
        else:
            body["prompt"] = prompt if not isinstance(prompt, tuple) else "\n\n".join(prompt)
        return msgspec.json.encode(body)

    @property
    def shows_reasoning(self) -> bool:
        """Whether the user sees the reasoning, because the requests ask for it by `include_reasoning`."""
        return self.fields.get("include_reasoning") is True

    def without(self, *names: str) -> Dialect:
        """Return a copy without these fields."""
        return replace(self, fields={name: value for name, value in self.fields.items() if name not in names})


class Client:
    """Connections to one server. Requests are never retried, because a failure is a result."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self.address = address
        self.shows_reasoning = False
        """See Dialect.shows_reasoning."""
        self._timeout_s = timeout_s
        self._idle: deque[Connection] = deque(maxlen=_MAX_IDLE)
        self._ip = ""
        self._tls = ssl.create_default_context() if address.secure else None

    async def open(self) -> None:
        """Resolve the host name once. Raises ConfigError if that fails."""
        loop = asyncio.get_running_loop()
        try:
            addresses = await loop.getaddrinfo(self.address.host, self.address.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConfigError(
                f"Cannot reach {self.address.url}: {reason(error)}. Check the address.", param="url"
            ) from None
        self._ip = str(addresses[0][4][0])

    async def warm(self, count: int) -> None:
        """Open connections in advance, so that a burst of first requests does not measure the time to connect."""
        opened = await asyncio.gather(*(self._new() for _ in range(count)), return_exceptions=True)
        now = asyncio.get_running_loop().time()
        for connection in opened:
            if isinstance(connection, Connection):
                connection.idle_since = now
                self._idle.append(connection)

    async def send(self, data: bytes) -> Reply:
        """Send a request and return its reply when it has ended. Failures are in `reply.error`."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        reply = Reply(partial(resolve_future, ended), shows_reasoning=self.shows_reasoning)
        try:
            connection = await self._connect()
        except OSError as error:
            reply.sent = reply.ended = loop.time()
            reply.error = f"no connection: {reason(error)}"
            return reply
        timer = loop.call_later(self._timeout_s, connection.abandon, f"no complete answer within {self._timeout_s:g} s")
        connection.send(data, reply)
        try:
            await ended
        except asyncio.CancelledError:
            connection.close()
            raise
        finally:
            timer.cancel()
        if not connection.closed:
            self._idle.append(connection)
        return reply

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and loop.time() - connection.idle_since < IDLE_S:
                return connection
            connection.close()
        return await self._new()

    async def _new(self) -> Connection:
        name = self.address.host if self._tls else None
        _, connection = await asyncio.get_running_loop().create_connection(
            Connection, self._ip, self.address.port, ssl=self._tls, server_hostname=name
        )
        return connection

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
