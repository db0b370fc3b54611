"""A server with a key: no path, header or method gets around it."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import pytest

from .conftest import FLAGS, MEMORY_MB
from .served import Served, served
from .test_smuggling import statuses

KEY = "sésame-\u0416"
RAW = KEY.encode()
OPEN = ("/health", "/dashboard", "/chat", "/dashboard/chat/main.js", "/dashboard/style.css")


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("keys"), *FLAGS, "--api-key", KEY) as server:
        yield server


@pytest.fixture(autouse=True)
def unharmed_with_key(locked: Served) -> Iterator[None]:
    yield
    assert locked.send("GET", "/health").status == 200
    reply = locked.send(
        "POST", "/v1/completions", {"prompt": "hi", "max_tokens": 1}, {"x-api-key": RAW.decode("latin-1")}
    )
    assert reply.status == 200
    stats = locked.send("GET", "/admin/stats", headers={"x-api-key": RAW.decode("latin-1")}).json
    assert (
        stats["free"] + stats["used"] == stats["total"] and stats["running"] == stats["waiting"] == stats["used"] == 0
    )
    assert all(locked.memory[name] < most for name, most in MEMORY_MB.items())


def ask(server: Served, target: bytes, method: bytes = b"GET", *lines: bytes) -> int:
    """Status of a request whose target and lines are sent as they are."""
    head = (
        method + b" " + target + b" HTTP/1.1",
        b"Host: localhost",
        b"Connection: close",
        *lines,
        b"Content-Length: 0",
    )
    (status,) = statuses(server.exchange(b"\r\n".join((*head, b"", b""))))
    return status


def test_open_paths(locked: Served) -> None:
    for path in OPEN:
        assert ask(locked, path.encode()) == 200


@pytest.mark.parametrize(
    "target",
    [
        *(b"/v1/models", b"/metrics", b"/admin/stats", b"/requests", b"/dashboard/data", b"/version", b"/nowhere"),
        *(
            b"/v1/../health",
            b"/health/../v1/models",
            b"/health/..%2fv1/models",
            b"/./v1/models",
            b"//health",
            b"/health//",
        ),
        *(b"/health/", b"/health/x", b"/health;x", b"/health%00", b"/health%20", b"/HEALTH", b"/Health", b"/%2fhealth"),
        *(b"/%2e%2e/v1/models", b"/v1/%6dodels", b"/v1/models%3f", b"/health%3f/../v1/models", b"/health%23/v1/models"),
        *(
            b"/dashboard/chat/main.js/../../data",
            b"/dashboard/chat/../data",
            b"/dashboard/../metrics",
            b"/dashboard/x.js%00",
            b"/dashboard/..%2fdata",
        ),
        *(b"/v1/models?path=/health", b"/v1/models?/health", b"/v1/models#/health", b"\\health", b"/v1\\..\\health"),
        *(
            b"http://localhost/v1/models",
            b"http://localhost/health/../v1/models",
            b"/\xc3\xa9",
            b"/dashboard/grafana.json",
        ),
    ],
)
def test_no_path_gets_around_the_key(locked: Served, target: bytes) -> None:
    """401 for everything that is not open as it stands; what is no path at all is 400."""
    for method in (b"GET", b"POST", b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"health"):
        assert ask(locked, target, method, b"Content-Type: application/json") in (400, 401)


def test_an_encoded_path_is_the_path_it_stands_for(locked: Served) -> None:
    """A letter may be encoded: then it is the open path, and has nothing else to show."""
    assert ask(locked, b"/%68ealth") == 200


def test_other_methods_of_open_paths_do_nothing(locked: Served) -> None:
    for path in OPEN:
        for method in (b"POST", b"PUT", b"DELETE", b"PATCH", b"TRACE", b"OPTIONS"):
            assert ask(locked, path.encode(), method, b"Content-Type: application/json") in (404, 405)


@pytest.mark.parametrize(
    "lines",
    [
        (),
        (b"Authorization:",),
        (b"Authorization: Bearer",),
        (b"Authorization: Bearer ",),
        (b"Authorization: " + RAW,),
        (b"Authorization: Basic " + RAW,),
        (b"Authorization: Bearer " + RAW.upper(),),
        (b"Authorization: Bearer " + RAW[:-1],),
        (b"Authorization: Bearer " + RAW + b"x",),
        (b"Authorization: Bearer " + RAW + b", Bearer x",),
        (b"Authorization: Bearer " + KEY.encode("utf-16-le"),),
        (b"Authorization: Bearer se\xcc\x81same-\xd0\x96",),  # the same letters in another form
        (b"Authorization: Bearer " + b"x" * 8000,),
        (b"Authorization: Bearer x", b"X-Api-Key: " + RAW),
        (b"X-Api-Key:",),
        (b"X-Api-Key: *",),
        (b"X-Api-Key: " + RAW + RAW,),
        (b"Api-Key: " + RAW,),
        (b"Cookie: api_key=" + RAW,),
        (b"X-Original-URL: /health", b"X-Rewrite-URL: /health", b"X-Forwarded-For: 127.0.0.1"),
        (b"X-HTTP-Method-Override: OPTIONS",),
        (b"Origin: null", b"Access-Control-Request-Method: GET"),
    ],
)
def test_keys_that_are_wrong(locked: Served, lines: tuple[bytes, ...]) -> None:
    for target in (
        b"/v1/models",
        b"/v1/models?api_key=" + quote(KEY).encode(),
        b"/v1/models?key=x&authorization=Bearer+x",
    ):
        for method in (b"GET", b"OPTIONS"):
            assert ask(locked, target, method, *lines) in (400, 401, 403), (target, lines)


@pytest.mark.parametrize(
    "name", [b"Authorization: Bearer ", b"authorization: bearer   ", b"X-API-KEY: ", b"x-api-key:\t"]
)
def test_the_key_opens(locked: Served, name: bytes) -> None:
    assert ask(locked, b"/v1/models", b"GET", name + RAW + b"  ") == 200
