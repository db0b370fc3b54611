"""HTTP itself: what cannot be read, what does not come, and pages of other sites."""

from __future__ import annotations

import gzip
import socket
import zlib

import pytest

from ridgeline.core.errors import ConfigError
from ridgeline.service.bodies import Bodies
from ridgeline.service.origins import Origins
from ridgeline.service.server import http_log

from .live import Live, Reply, behaviour, counts, live

JSON_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"GET /v1/models/" + b"a" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nno header\r\n\r\n",
        JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        b"\x16\x03\x01nonsense\r\n\r\n",
    ],
    ids=("length", "address", "header", "chunk", "tls"),
)
def test_what_is_no_http_leaves_no_traceback_in_the_log(sent: bytes, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    with live(behaviour(counts)) as server:
        sock = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        sock.sendall(sent)
        data = b""
        while part := sock.recv(65536):
            data += part
        head, _, body = data.partition(b"\r\n\r\n")
        assert b" 400 " in head.splitlines()[0] and b"x-request-id: req_" in head
        error = Reply(400, {}, body).error
        assert error["type"] == "invalid_request_error" and len(error["message"]) < 160
        malformed = error["message"].startswith("Malformed HTTP request: ")
        assert malformed or b"chunked" in sent  # there the head was good
        assert server.complete(max_tokens=1).status == 200
    records = [record for record in caplog.records if record.name.startswith(("aiohttp", "ridgeline.service"))]
    assert {record.levelname for record in records} == {"INFO"} and not any(record.exc_info for record in records)
    lines = [record for record in records if "127.0.0.1" in record.message or "Unhandled" in record.message]
    assert len(lines) == (0 if sent.startswith(b"\x16") else 1)  # of TLS on this port aiohttp itself says nothing


def test_what_is_refused_before_the_application_is_asked_has_the_same_shape(endless: Live):
    answer = endless.send("POST", "/v1/completions", {}, {"Expect": "wonders"})
    assert answer.status == 417 and "wonders" in answer.error["message"] and answer.headers["x-request-id"]


def test_an_encoding_that_nobody_undoes_is_named(endless: Live):
    answer = endless.send("POST", "/v1/completions", b"\x00\x01\x02", {"Content-Encoding": "smaller"})
    assert answer.status == 400 and "content-encoding 'smaller' is not supported" in answer.error["message"]
    body = b'{"prompt": "hi", "max_tokens": 1}'  # refused even if it is good as it stands
    assert endless.send("POST", "/v1/completions", body, {"Content-Encoding": "br"}).status == 400
    plain = endless.send("POST", "/v1/completions", b"\x00", {"Content-Encoding": "identity"})
    assert plain.status == 400 and "not valid JSON" in plain.error["message"]


@pytest.mark.parametrize("cut", [None, 1, 100])
def test_compressed_bodies(cut: int | None):
    """In any pieces, with several members of gzip, and deflate with and without its header."""
    body = b'{"prompt": "hi", "max_tokens": 1, "user": "' + b"abc " * 200 + b'"}'
    raw = zlib.compressobj(wbits=-15)
    packed = {
        "gzip": (gzip.compress(body), gzip.compress(body[:99]) + gzip.compress(body[99:])),
        "deflate": (zlib.compress(body), raw.compress(body) + raw.flush()),
        "Identity": (body,),
    }
    with live(behaviour(counts)) as server:
        if cut:
            server.server.front.bodies = Bodies(1 << 20, piece=cut)
        for encoding, data in ((encoding, data) for encoding, forms in packed.items() for data in forms):
            assert server.send("POST", "/v1/completions", data, {"Content-Encoding": encoding}).status == 200
            if encoding != "Identity":
                for broken in (data[:-9], data + b"x", b"x" + data):
                    refused = server.send("POST", "/v1/completions", broken, {"Content-Encoding": encoding})
                    assert refused.status == 400 and f"not valid {encoding}" in refused.error["message"]


def test_half_a_body_does_not_hold_its_connection_for_ever():
    with live(behaviour(counts)) as server:
        server.server.front.bodies = Bodies(1 << 20, patience_s=0.2)
        sock = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        sock.sendall(JSON_HEAD + b"Content-Length: 99\r\n\r\n{")
        head = sock.recv(65536)
        assert head.startswith(b"HTTP/1.1 408 ") and b'"code":"body_too_slow"' in head
        server.until(lambda: server.server.front.active == 0)
        sock.close()


PAGE = {"Origin": "https://a.example"}
ASKS = {**PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


@pytest.mark.parametrize("allowed", ["https://a.example, http://localhost:3000", "*"])
def test_pages_of_allowed_sites_may_ask(allowed: str):
    with live(behaviour(counts), allowed_origins=allowed, api_key="secret") as server:
        path = "/v1/chat/completions"
        response = server.send("OPTIONS", path, headers=ASKS)  # a browser sends no key here
        assert (response.status, response.data) == (204, b"")
        assert response.headers["access-control-allow-headers"] == "authorization,content-type"
        assert "POST" in response.headers["access-control-allow-methods"]
        key = {**PAGE, "authorization": "Bearer secret"}
        answers = [server.chat(key, max_tokens=2, stream=stream) for stream in (False, True)]
        answers += [server.chat(PAGE), server.send("GET", "/nowhere", headers=key), response]
        for answer in answers:
            mine = "*" if allowed == "*" else PAGE["Origin"]
            assert answer.headers["access-control-allow-origin"] == mine
            assert ("vary" in answer.headers) == (allowed != "*")
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
        other = {**ASKS, "Origin": "https://a.example.evil"}
        refused = server.send("OPTIONS", path, headers=other)
        assert ("access-control-allow-origin" in refused.headers) == (allowed == "*")
        assert refused.status == (204 if allowed == "*" else 403)


def test_no_page_of_another_site_may_ask_by_default(endless: Live):
    for method, headers in (("OPTIONS", ASKS), ("GET", PAGE)):
        answer = endless.send(method, "/v1/models", headers=headers)
        assert (answer.status, answer.error["code"]) == (403, "cross_site_request")
        assert not [name for name in answer.headers if "access-control" in name or name == "vary"]


@pytest.mark.parametrize(
    "origins", ["a.example", "https://a.example/", "https://a.example,", '["*"]', "https://*.example"]
)
def test_an_origin_that_no_browser_sends_is_refused_at_the_start(origins: str):
    with pytest.raises(ConfigError, match="https://chat.example.org"):
        Origins.parse(origins)


def test_what_breaks_in_the_server_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture):
    try:
        raise ValueError("ours")
    except ValueError:
        http_log.exception("Unhandled exception")
    assert [record.exc_text for record in caplog.records if "ours" in (record.exc_text or "")]
