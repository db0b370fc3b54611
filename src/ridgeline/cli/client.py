"""A small client of the chat API: streams one answer at a time and measures its latency. Uses the standard library only."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ridgeline.core.errors import ConfigError, RidgelineError
from ridgeline.core.reach import reason, unreachable

TIMEOUT_S = 600.0


@dataclass(slots=True)
class Answer:
    """The result of one request. text: without what the server has withdrawn. Times are seconds since the request was sent; ttft_s
    is None until text arrives."""

    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float | None = None
    total_s: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens per second after the first token; None for fewer than two tokens."""
        decoding = self.total_s - (self.ttft_s or 0.0)
        return (self.output_tokens - 1) / decoding if self.output_tokens > 1 and decoding > 0 else None


@dataclass(slots=True)
class ChatClient:
    """Client of the server at `url` ("http://host:port", with or without /v1)."""

    url: str
    api_key: str | None = None
    last: Answer = field(default_factory=Answer)
    """The answer of the last `stream`, complete when its iterator is exhausted."""

    def stream(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Iterator[str]:
        """Yield pieces of the answer as they arrive. Closing the iterator closes the connection, which cancels the request.

        Raises RidgelineError with the message of the server, or ConfigError if no server answers.
        """
        answer = self.last = Answer()
        body = {"messages": list(messages), "stream": True, "stream_options": {"include_usage": True}, **options}
        connection = self.connection()
        started = time.perf_counter()
        try:
            response = self._send(connection, body)
            for event in _events(response):
                piece = _record(answer, event)
                answer.total_s = time.perf_counter() - started
                if piece:
                    if answer.ttft_s is None:
                        answer.ttft_s = answer.total_s
                    answer.text += piece
                    yield piece
        finally:
            connection.close()

    def connection(self) -> http.client.HTTPConnection:
        """A connection that is not open yet. Raises ConfigError if `url` is not a valid address."""
        parts = urlsplit(self.url if "://" in self.url else f"http://{self.url}")
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        try:
            return kinds[parts.scheme](parts.hostname or "", parts.port, timeout=TIMEOUT_S)
        except (KeyError, ValueError, http.client.InvalidURL):  # another scheme, or a port that is not a number
            raise ConfigError(
                f"{self.url!r} is not the address of a server: give http://HOST:PORT.", param="url"
            ) from None

    def _send(self, connection: http.client.HTTPConnection, body: Mapping[str, Any]) -> http.client.HTTPResponse:
        headers = {"content-type": "application/json"}
        return self.request(connection, "POST", "/v1/chat/completions", json.dumps(body).encode(), headers)

    def request(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None,
        headers: Mapping[str, str],
    ) -> http.client.HTTPResponse:
        """Send a request with the key; returns the answer if its status is 200.

        Raises RidgelineError with the message of the server, or ConfigError if no server answers.
        """
        prefix = urlsplit(self.url).path.rstrip("/").removesuffix("/v1") if "://" in self.url else ""
        key = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            connection.request(method, prefix + path, body, {**headers, **key})
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise unreachable(self.url, error) from None
        if response.status != 200:
            raise RidgelineError(f"{self.url} answered {response.status}: {_error_message(response.read())}")
        return response


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the JSON of each `data:` line until [DONE]. Raises RidgelineError for an error event or a truncated stream."""
    try:
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise RidgelineError(str(event["error"].get("message", event["error"])))
            yield event
    except (OSError, http.client.HTTPException) as error:
        raise RidgelineError(f"The answer ended early: {reason(error)}.") from None
    except ValueError as error:
        raise RidgelineError(f"The server sent an event that is not JSON: {error}.") from None
    raise RidgelineError("The answer ended early: the server closed the connection.")


def _record(answer: Answer, event: Mapping[str, Any]) -> str:
    """Record usage and finish reason of an event in `answer`. Returns the text of the event."""
    usage = event.get("usage")
    if usage:
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.output_tokens = usage["completion_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    piece = ""
    for choice in event.get("choices", ()):
        piece += choice.get("delta", {}).get("content") or ""
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        if (withdrawal := choice.get("withdrawal")) is not None:
            answer.text, piece = "", withdrawal["replacement"]
    return piece


def _error_message(body: bytes) -> str:
    """The message of an error response, or the beginning of its body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
