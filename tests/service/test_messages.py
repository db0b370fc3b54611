"""Error messages: plain, with the field and the remedy."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from ridgeline.core.errors import RequestError
from ridgeline.service.fields import TABLE, read_fields
from ridgeline.service.readers import Refused

from .live import Live, behaviour, counts, live

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("route", "fields", "message"),
    [
        ("chat", {"prediction": {"type": "content"}}, "`prediction` is not supported; remove it."),
        ("chat", {"audio": {}}, "`audio` is not supported (the model writes text only); remove it."),
        ("completions", {"suffix": "x"}, '`suffix` is not supported; remove it or send "".'),
        ("chat", {"temperature": 9}, "temperature is 9: expected a number from 0 to 2."),
        ("completions", {"prompt": None}, "prompt is missing: send a string, a list of strings, "
         "a list of token ids or a list of such lists."),
        ("chat", {"stream_options": {"x": 1}}, "stream_options has the unknown member 'x': remove it. "
         "It may have include_usage, continuous_usage_stats, include_obfuscation."),
    ],
)  # fmt: skip
def test_fields(route: Any, fields: dict[str, Any], message: str) -> None:
    given = {"messages": HI} if route == "chat" else {"prompt": "hi"}
    with pytest.raises(RequestError) as error:
        read_fields(route, {**given, **fields})
    assert error.value.message == message


@pytest.mark.parametrize(
    "field", [field for field in TABLE if isinstance(field.reader, Refused)], ids=lambda field: field.name
)
def test_what_is_not_supported_says_how_to_go_on(field: Any) -> None:
    with pytest.raises(RequestError) as error:
        field.reader.read(field.name, field.bad[0])
    message = error.value.message
    assert message.startswith(f"`{field.name}` is not supported") and "; remove it" in message
    assert len(message) < 120


def test_a_body_that_is_no_object(endless: Live) -> None:
    assert endless.send("POST", "/v1/completions", b"[]").error["message"] == (
        "The body is not a JSON object: send an object with prompt."
    )
    assert endless.send("POST", "/detokenize", {}).error["message"] == "tokens is missing: send a list of token ids."


def test_a_target_that_is_no_path(endless: Live) -> None:
    with socket.create_connection(("127.0.0.1", endless.port), timeout=10) as sock:
        sock.sendall(b"GET version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"Malformed HTTP request: the request target is not valid, send a path such as /v1/models." in sock.recv(
            9999
        )


def test_routes(endless: Live) -> None:
    assert endless.get("/nowhere").error["message"] == "Unknown route GET /nowhere: check the path."
    assert endless.get("/v1/completions").error["message"] == "/v1/completions does not accept GET: use POST."


def test_what_the_engine_cannot_run_now_may_be_sent_again() -> None:
    with live(behaviour(counts, fail_after=0, fails_as="unavailable")) as server:
        answer = server.complete(guided_regex="a+")
        assert (answer.status, answer.error["code"]) == (503, "unavailable") and answer.headers["retry-after"]
