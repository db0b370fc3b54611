"""Who may use the server: names it may be called by, pages of other sites, content types and keys."""

from __future__ import annotations

import socket

import pytest

from ridgeline.core.errors import ConfigError
from ridgeline.service.hosts import Hosts

from .live import Live, Reply, behaviour, counts, live, says

POSTS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/reset_prefix_cache")
GETS = ("/health", "/version", "/metrics", "/v1/models", "/requests", "/admin/stats", "/dashboard/data")
PAGES = ("/dashboard", "/chat")
EVIL = "https://evil.example"


@pytest.fixture(scope="module")
def server():
    with live(behaviour(counts)) as running:
        yield running


def raw(server: Live, head: str) -> Reply:
    """A request whose head is sent as it is; only the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(head.encode())
        data = b""
        while part := sock.recv(1 << 16):
            data += part
    first, _, body = data.partition(b"\r\n\r\n")
    return Reply(int(first.split()[1]), {}, body)


def generated(server: Live) -> tuple[int, int]:
    """Requests that reached the engine, and prefix caches that were reset."""
    return len(server.engine.submits), server.engine.orders.count("reset_prefix_cache")


# --- Host -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "localhost.evil.example", "10.0.0.1", "[::2]:1",
                                  "127.0.0.1.evil.example", "localhost@evil.example", "", "evil.localhost"])  # fmt: skip
def test_a_foreign_host_is_refused_on_loopback(server: Live, host: str) -> None:
    before = generated(server)
    named = {"host": host.format(port=server.port)}
    for path in (*GETS, *PAGES, "/nowhere"):
        answer = server.send("GET", path, headers=named)
        assert (answer.status, answer.error["code"]) == (403, "host_not_allowed"), path
        assert "--allowed-hosts" in answer.error["message"]
    for path in POSTS:
        assert server.send("POST", path, {"prompt": "hi"}, named).status == 403
    assert generated(server) == before


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:1", "127.0.0.1", "127.8.9.1:80", "[::1]:8000", "[::1]", "localhost."]
)
def test_loopback_has_many_names(server: Live, host: str) -> None:
    assert server.send("GET", "/v1/models", headers={"host": host}).status == 200


@pytest.mark.parametrize(
    ("listen", "allowed", "good", "bad"),
    [
        ("127.0.0.1", "chat.example.org, 10.0.0.5,[FD00::1]",
         ["chat.example.org:80", "Chat.Example.ORG", "10.0.0.5", "[fd00::1]:7", "localhost"],
         ["evil.example", "a.chat.example.org"]),
        ("localhost", "*", ["evil.example", "localhost"], []),
        ("::1", "", ["localhost"], ["evil.example"]),
        ("0.0.0.0", "", ["evil.example", "10.0.0.5:1"], []),
        ("0.0.0.0", "chat.example.org", ["chat.example.org", "localhost:2", "127.0.0.1"], ["evil.example", "10.0.0.5"]),
    ],
)  # fmt: skip
def test_which_hosts_are_allowed(listen: str, allowed: str, good: list[str], bad: list[str]) -> None:
    hosts = Hosts.parse(allowed, listen)
    for name in good:
        hosts.check(name)
    for name in bad:
        with pytest.raises(Exception, match="--allowed-hosts"):
            hosts.check(name)


def test_an_allowed_host_is_served() -> None:
    with live(behaviour(counts), allowed_hosts="chat.example.org") as server:
        assert server.complete({"host": "chat.example.org"}, max_tokens=1).status == 200
        assert server.complete({"host": "other.example.org"}, max_tokens=1).status == 403


@pytest.mark.parametrize("text", ["https://a.example", "a.example:80", "a.example,", "a b", "*.example.org"])
def test_a_name_that_no_host_has_is_refused_at_the_start(text: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts has"):
        Hosts.parse(text, "127.0.0.1")


def test_the_host_must_be_named_once(server: Live) -> None:
    assert raw(server, "GET /version HTTP/1.1\r\nConnection: close\r\n\r\n").status == 400
    twice = "GET /version HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    assert raw(server, twice).status == 400
    assert raw(server, "GET /version HTTP/1.0\r\n\r\n").status == 200  # before Host was there; no browser speaks it
    assert raw(server, "GET /version HTTP/1.0\r\nHost: evil.example\r\n\r\n").status == 403


def test_a_target_with_a_host_is_checked_too(server: Live) -> None:
    end = "Host: localhost\r\nConnection: close\r\n\r\n"
    assert raw(server, f"GET http://evil.example/version HTTP/1.1\r\n{end}").status == 403
    assert raw(server, f"GET http://localhost:1/version HTTP/1.1\r\n{end}").status == 200


# --- pages of other sites -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", [EVIL, "null", "http://localhost:1", "http://127.0.0.1", "file://", ""])
@pytest.mark.parametrize("key", [None, "secret"])
def test_pages_of_other_sites_are_refused_on_every_route(origin: str, key: str | None) -> None:
    with live(behaviour(counts), api_key=key) as server:
        before = generated(server)
        headers = {"origin": origin, "authorization": "Bearer secret"}
        for method, paths in (("GET", (*GETS, *PAGES)), ("POST", POSTS), ("OPTIONS", POSTS)):
            for path in paths:
                answer = server.send(method, path, {"prompt": "hi"} if method == "POST" else None, headers)
                assert (answer.status, answer.error["code"]) == (403, "cross_site_request"), (method, path)
                assert "--allowed-origins" in answer.error["message"]
        assert generated(server) == before


def test_the_servers_own_pages_are_allowed(server: Live) -> None:
    for host in (f"127.0.0.1:{server.port}", f"localhost:{server.port}", f"[::1]:{server.port}", "localhost"):
        for scheme in ("http", "https"):  # a proxy may speak TLS for us
            headers = {"host": host, "origin": f"{scheme}://{host}", "sec-fetch-site": "same-origin"}
            assert server.complete(headers, max_tokens=1).status == 200
    assert server.complete({"host": "localhost:443", "origin": "https://localhost"}, max_tokens=1).status == 200
    assert server.complete({"host": "localhost:81", "origin": "http://localhost"}, max_tokens=1).status == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_what_a_page_of_another_site_loads_is_refused(server: Live, site: str) -> None:
    """Images, scripts, frames and forms by GET carry no Origin."""
    for mode, target in (("no-cors", "image"), ("no-cors", "script"), ("navigate", "iframe"), ("navigate", "document")):
        headers = {"sec-fetch-site": site, "sec-fetch-mode": mode, "sec-fetch-dest": target}
        for path in GETS:
            answer = server.send("GET", path, headers=headers)
            assert (answer.status, answer.error["code"]) == (403, "cross_site_request"), (path, headers)
        for path in PAGES:
            assert server.send("GET", path, headers=headers).status == (200 if target == "document" else 403)
            assert server.send("HEAD", path, headers=headers).status == 403


def test_what_a_user_types_and_what_our_pages_load_is_served(server: Live) -> None:
    for site in ("none", "same-origin"):
        for path in (*GETS, *PAGES):
            assert server.send("GET", path, headers={"sec-fetch-site": site}).status == 200


@pytest.mark.parametrize("allowed", [f"{EVIL},https://b.example", "*"])
def test_an_allowed_site_is_served(allowed: str) -> None:
    with live(behaviour(counts), allowed_origins=allowed) as server:
        page = {"origin": EVIL, "sec-fetch-site": "cross-site", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"}
        assert server.complete(page, max_tokens=1).status == 200
        assert server.send("GET", "/v1/models", headers=page).status == 200
        silent = {"sec-fetch-site": "cross-site"}  # an image: nobody knows of which site
        assert server.send("GET", "/v1/models", headers=silent).status == (200 if allowed == "*" else 403)


# --- content types --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        *("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"),
        *("text/plain; application/json", "application/jsonp", "application/json-seq", "text/json"),
    ],
)
def test_a_post_must_say_that_it_sends_json(server: Live, kind: str) -> None:
    before = generated(server)
    for path in POSTS:
        answer = server.send("POST", path, {"prompt": "hi"}, {"content-type": kind})
        assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")
        assert "content-type: application/json" in answer.error["message"]
    assert generated(server) == before
    assert server.send("POST", "/nowhere", {}, {"content-type": kind}).status == 404


def test_a_post_without_a_content_type(server: Live) -> None:
    head = "Host: localhost\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    for path in POSTS:
        assert raw(server, f"POST {path} HTTP/1.1\r\n{head}").status == 415


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON", "application/json; charset=utf-8",
                                  "application/json;charset=UTF-8", "application/vnd.openai+json"])  # fmt: skip
def test_json_has_several_names(server: Live, kind: str) -> None:
    assert server.complete({"content-type": kind}, max_tokens=1).status == 200
    assert server.send("POST", "/reset_prefix_cache", headers={"content-type": kind}).status == 200


# --- keys -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "secret"}, 200),
        ({"X-API-Key": " secret "}, 200),
        ({"authorization": "Bearer secret"}, 200),
        ({"authorization": "bearer secret", "x-api-key": "wrong"}, 200),
        ({"authorization": "Bearer wrong", "x-api-key": "secret"}, 401),
        ({"authorization": "Basic dTpw", "x-api-key": "secret"}, 200),  # a proxy's own
        ({"authorization": "Basic dTpw"}, 401),
        ({"x-api-key": "Secret"}, 401),
        ({"x-api-key": "Bearer secret"}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "\xff\xfe"}, 401),
        ({}, 401),
    ],
)
def test_a_key_comes_in_either_header(headers: dict[str, str], status: int) -> None:
    with live(behaviour(says("hi")), api_key="secret") as server:
        assert server.complete(headers).status == status
        if status == 401:
            assert "x-api-key: KEY" in server.complete(headers).error["message"]
