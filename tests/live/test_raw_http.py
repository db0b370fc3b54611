"""Bytes that no HTTP library sends: bodies of refused requests, requests in pieces, compressed bodies of nothing, clients that
leave at any byte, and every path of the server without its key."""

from __future__ import annotations

import gzip
import json
import random
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from urllib.parse import quote

import pytest

from ..service.live import Live, behaviour, counts, live
from .honest import REQUESTS
from .served import Served, bounded_growth, growth, post, refused
from .test_smuggling import AMBIGUOUS, BODY, HIDDEN, HOST, LAST, TYPE, statuses

LONG = pytest.mark.long
LIMIT = 4 << 20
"""Bytes of the server's --max-body-mb."""

unharmed = pytest.mark.usefixtures("unharmed")


# --- one request, one answer ----------------------------------------------------------------------------------------------

REFUSED_EARLY = {
    "unknown route": ("POST /nowhere", TYPE, 404),
    "wrong method": ("POST /health", TYPE, 405),
    "content type": ("POST /tokenize", "Content-Type: text/plain\r\n", 415),
    "origin": ("POST /tokenize", f"{TYPE}Origin: https://evil.example\r\n", 403),
    "host in the target": ("POST http://evil.example/tokenize", TYPE, 403),
    "encoding": ("POST /tokenize", f"{TYPE}Content-Encoding: br\r\n", 400),
    "expectation": ("POST /tokenize", f"{TYPE}Expect: nothing\r\n", 417),
    "not JSON": ("POST /tokenize", TYPE, 400),
    "upgrade": ("POST /tokenize", f"{TYPE}Connection: Upgrade\r\nUpgrade: websocket\r\n", 400),
    "body of a GET": ("GET /version", "", 200),
    "body of a HEAD": ("HEAD /version", "", 200),
}
"""Request, further headers and status of requests that are answered before their body is read, or without reading it."""


@unharmed
@pytest.mark.parametrize("repeats", [1, 3000], ids=["small", "large"])
def test_the_body_of_a_refused_request_is_not_the_next_request(server: Served, repeats: int) -> None:
    """It is skipped to its end, and the next request on the connection is answered; or the connection closes."""
    body = HIDDEN * repeats
    framings = (
        f"Content-Length: {len(body)}\r\n\r\n{body}",
        f"Transfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n{body}\r\n0\r\n\r\n",
    )
    for name, (request, headers, status) in REFUSED_EARLY.items():
        for framed in framings:
            data = exchange(server, [f"{request} HTTP/1.1\r\n{HOST}{headers}{framed}{LAST}".encode()])
            assert statuses(data) in ([status, 200], [status]), (name, data[:300])
            assert b"/smuggled" not in data, name


@unharmed
def test_what_follows_the_last_request_is_not_answered(server: Served) -> None:
    """After `Connection: close`, HTTP/1.0 and HTTP/0.9 nothing may follow; trailers cannot change the body's length."""
    trailer = "Transfer-Encoding: chunked\r\n\r\n10\r\n" + BODY + "\r\n0\r\n"
    for data in (
        f"GET /version HTTP/1.1\r\n{HOST}Connection: close\r\n\r\n{HIDDEN}",
        f"GET /version HTTP/1.0\r\n{HOST}\r\n{HIDDEN}",
        f"POST /tokenize HTTP/1.1\r\n{HOST}{TYPE}{trailer}Content-Length: {len(HIDDEN)}\r\n\r\n{HIDDEN}",
        f"POST /tokenize HTTP/1.1\r\n{HOST}{TYPE}{trailer}{HIDDEN}",
        f"GET /version\r\n\r\n{HIDDEN}",
    ):
        answer = exchange(server, [data.encode()])
        assert len(statuses(answer)) == 1 and statuses(answer)[0] in (200, 400), (data, answer[:300])
        assert b"/smuggled" not in answer


@unharmed
@pytest.mark.parametrize("times", [1, pytest.param(20, marks=LONG)])
def test_packets_do_not_change_what_a_request_means(server: Served, times: int) -> None:
    """The answers to requests of two meanings are the same wherever their bytes are divided."""
    draw = random.Random(times)
    valid = post("/tokenize", BODY.encode()).decode()
    ambiguous = {name: text for kind in AMBIGUOUS.values() for name, text in kind.items()}
    with bounded_growth(server):
        for name, text in {**ambiguous, "valid": valid * 3}.items():
            data = (text + LAST).encode()
            whole = statuses(exchange(server, [data]))
            for _ in range(times):
                cuts = [0, *sorted(draw.sample(range(1, len(data)), 3)), len(data)]
                parts = [data[start:end] for start, end in pairwise(cuts)]
                assert statuses(exchange(server, parts)) == whole, (name, cuts)


def exchange(server: Served, parts: list[bytes]) -> bytes:
    """Everything the server answers to these packets until it closes the connection, also to a sender that it stops."""
    answer = b""
    with server.raw(b"") as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(ConnectionError):
            for part in parts:
                sock.sendall(part)
        with suppress(ConnectionError):
            while received := sock.recv(1 << 16):
                answer += received
    return answer


# --- compressed bodies ----------------------------------------------------------------------------------------------------

EMPTY_BLOCK = b"\x00\x00\x00\xff\xff"
LONG_NAME = b"\x1f\x8b\x08\x08" + bytes(5) + b"\xff"
"""Start of a gzip header; a file name of any length follows."""


@unharmed
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
def test_compressed_bodies_of_nothing_have_the_limit_of_bodies(server: Served, chunked: bool) -> None:
    """They never reach the limit of what is decompressed, so that what is received has a limit too."""
    size = 2 * LIMIT

    def ask(encoding: str, body: bytes) -> None:
        head = f"POST /tokenize HTTP/1.1\r\n{HOST}{TYPE}Connection: close\r\nContent-Encoding: {encoding}\r\n"
        length = f"Content-Length: {len(body)}\r\n\r\n".encode()
        framed = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        answer = exchange(server, [head.encode() + (framed if chunked else length + body)])
        assert statuses(answer) == [413], (encoding, answer[:300])

    def ask_all() -> None:
        ask("deflate", zlib.compress(b"")[:2] + EMPTY_BLOCK * (size // len(EMPTY_BLOCK)))
        ask("gzip", LONG_NAME + b"a" * size)

    assert growth(server, ask_all) < 100


@unharmed
@pytest.mark.parametrize("content", [b"", BODY.encode()], ids=["empty", "full"])
def test_the_number_of_gzip_members_is_bounded(server: Served, content: bytes) -> None:
    """A body within the limit that consists of many small members would take seconds of the event loop."""
    member = gzip.compress(content)
    body = member * (LIMIT // len(member))
    with bounded_growth(server), ThreadPoolExecutor(4) as pool:
        headers = {"content-encoding": "gzip"}
        asked = [pool.submit(server.send, "POST", "/tokenize", body, headers) for _ in range(4)]
        for future in asked:
            refused(future.result(), 400, "content-encoding")
            assert "more than 1024 members" in future.result().error["message"]
    letters = b"".join(gzip.compress(bytes([letter])) for letter in BODY.encode())
    assert server.send("POST", "/tokenize", letters, headers).status == 200


@unharmed
def test_damaged_gzip_is_refused(server: Served) -> None:
    whole = gzip.compress(BODY.encode())
    draw = random.Random(1)
    damaged = [whole[:cut] for cut in range(1, len(whole))]
    damaged += [
        whole + b"garbage",
        whole + bytes(100),
        gzip.compress(whole),
        whole[:-8] + bytes(8),
        whole[:-4] + bytes(4),
    ]
    damaged += [LONG_NAME, b"\x1f\x8b\x08\xff" + whole[4:], draw.randbytes(1000)]
    for body in damaged:
        refused(server.send("POST", "/tokenize", body, {"content-encoding": "gzip"}))
    assert server.send("POST", "/tokenize", whole, {"content-encoding": "gzip"}).status == 200


# --- clients that leave ---------------------------------------------------------------------------------------------------


@unharmed
@pytest.mark.parametrize("count", [16, pytest.param(100, marks=LONG)])
def test_clients_that_leave_at_any_byte(server: Served, count: int) -> None:
    """Of the request or of its answer: by a reset or by a close."""
    draw = random.Random(count)
    visits = [(draw.random(), draw.choice(sorted(REQUESTS)), draw.choice((True, False))) for _ in range(count)]
    with bounded_growth(server), ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda visit: leave(server, *visit), visits))
        assert server.rest()["used"] == 0


def leave(server: Served, moment: float, name: str, resets: bool) -> None:
    """Send a request and go. moment: below 1/2 while it is sent, else while its answer arrives."""
    path, body = REQUESTS[name]
    data = post(path, json.dumps({**body, "stream": True}).encode(), "Connection: close")
    with suppress(ConnectionError), server.raw(data[: round(2 * moment * len(data))]) as sock:
        wanted = round((moment - 0.5) * 4000)  # bytes of the answer
        while wanted > 0 and (part := sock.recv(min(wanted, 64))):
            wanted -= len(part)
        if resets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


# --- the key, on every route ----------------------------------------------------------------------------------------------

KEY = "sésame"
OPEN = {"/", "/health", "/openapi.json", "/dashboard", "/chat", "/docs"}
TRICKS: tuple[Callable[[str], str], ...] = (
    *(lambda path: path, lambda path: f"/{path}", lambda path: f"/.{path}", lambda path: f"/v1/..{path}"),
    *(lambda path: f"/health/..{path}", lambda path: f"/health/%2e%2e{path}", lambda path: f"/health%2f..{path}"),
    *(lambda path: f"{path}/", lambda path: f"{path}/.", lambda path: f"{path};x", lambda path: f"{path}%00"),
    *(
        lambda path: f"{path}%20",
        lambda path: f"{path}%2f",
        lambda path: f"{path}/../health",
        lambda path: path.upper(),
    ),
    *(lambda path: f"{path}?api_key={quote(KEY)}", lambda path: f"{path}?/health", lambda path: f"{path}#/health"),
    *(lambda path: "".join(f"%{ord(letter):02x}" if letter.isalpha() else letter for letter in path),),
    *(
        lambda path: path.replace("/", "%2f"),
        lambda path: path.replace("/", "\\"),
        lambda path: path.replace("/", "//"),
    ),
)


@pytest.fixture(scope="module", params=["", "/llm"], ids=["root", "prefix"])
def locked(request: pytest.FixtureRequest) -> Iterator[tuple[Live, str]]:
    """A server with a key, and the path before its routes. Nothing reaches its engine."""
    with live(behaviour(counts), api_key=KEY, root_path=request.param) as server:
        yield server, request.param
        assert not server.engine.submits and not server.engine.orders
        assert server.send("GET", "/health").status == 200


def ask(server: Live, method: str, targets: list[str], headers: dict[str, str] | None = None) -> dict[str, int]:
    """Status of each target, all on one connection."""
    connection, answered = server.connect(), {}
    for target in targets:
        connection.request(method, target, headers={"content-type": "application/json", **(headers or {})})
        response = connection.getresponse()
        response.read()
        answered[target] = response.status
    connection.close()
    return answered


def routes(server: Live) -> list[str]:
    """A path of every route, from the description that the server gives of itself, and of the files of the pages."""
    document = server.send("GET", "/openapi.json").json
    paths = [path.replace("{name}", "tiny-test").replace("{id}", "req_1") for path in document["paths"]]
    return [*paths, "/dashboard/data", "/dashboard/grafana.json", "/dashboard/alerts.yml"]


def test_every_route_but_the_open_ones_asks_for_the_key(locked: tuple[Live, str]) -> None:
    """In whatever way its path is written, with and without the prefix, by every method."""
    server, prefix = locked
    closed = [path for path in routes(server) if path not in OPEN]
    assert len(closed) > 10
    plain = [before + path for path in closed for before in ("", prefix)]
    tricked = [prefix + trick(path) for path in closed for trick in TRICKS]
    for method, targets in (
        ("GET", tricked),
        ("POST", tricked),
        ("OPTIONS", plain),
        ("HEAD", plain),
        ("health", plain),
    ):
        answered = ask(server, method, targets)
        passed = {target: status for target, status in answered.items() if status not in (400, 401)}
        assert not passed, method


def test_open_routes_are_open_only_as_they_are_written(locked: tuple[Live, str]) -> None:
    server, prefix = locked
    for path in sorted(OPEN):
        variants = [
            f"/{path}",
            f"{path}//",
            f"{path};x",
            f"{path}%00",
            f"{path}/x",
            f"{path}%2fx",
            f"{path}X",
            f"/x{path}x",
        ]
        assert set(ask(server, "GET", [prefix + path]).values()) <= {200, 302, 307, 308}
        answered = ask(server, "GET", [prefix + variant for variant in variants])
        assert set(answered.values()) <= {400, 401}, answered


def test_the_prefix_itself_opens_nothing(locked: tuple[Live, str]) -> None:
    server, _ = locked
    targets = ["/llmx/health", "/LLM/health", "/llm/llm/health", "/%6clm/health", "/llm//health", "//llm/health"]
    targets += ["/llm/health/../v1/models", "/llm/../v1/models", "/llm%2fhealth", "/llm%2f..%2fv1%2fmodels"]
    assert set(ask(server, "GET", targets).values()) <= {400, 401}


def test_only_the_key_is_the_key(locked: tuple[Live, str]) -> None:
    server, prefix = locked
    for given in ("", " ", "*", "null", "None", KEY.upper(), KEY[:-1], f"{KEY}x", f'"{KEY}"', quote(KEY), "sesame"):
        sent = given.encode().decode("latin-1")
        for headers in ({"authorization": f"Bearer {sent}"}, {"x-api-key": sent}, {"api-key": sent}, {"cookie": sent}):
            assert set(ask(server, "GET", [f"{prefix}/v1/models"], headers).values()) == {401}, headers
    right = {"x-api-key": KEY.encode().decode("latin-1")}
    assert ask(server, "GET", [f"{prefix}/v1/models"], right) == {f"{prefix}/v1/models": 200}
