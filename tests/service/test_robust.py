"""What goes wrong: bad bodies, full queues, missing keys, clients that leave or stall, engines that die."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from ridgeline.service import answer as answer_module
from ridgeline.service import app as app_module
from ridgeline.service.gate import Gate
from ridgeline.text.tokenizer import Tokenizer

from .live import MODEL, Live, behaviour, counts, ids, live, says

JSON_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODIES = [
    b"",
    b"{",
    b"[" * 50_000,
    b"\xff\xfe",
    b'{"messages": NaN}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"a": 1e999}',
    b"[]",
    b"7",
    b"null",
    b'"text"',
    b'{"messages": [{"role": "user", "content": "\xff"}]}',
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_bodies_that_are_no_requests(endless: Live, path: str):
    for body in BODIES:
        answer = endless.send("POST", path, body)
        assert answer.status == 400, (body[:20], answer.data)
        assert answer.error["type"] == "invalid_request_error"
    assert endless.send("GET", "/health").status == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/chat/completions", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
    ],
)
def test_wrong_addresses(endless: Live, method: str, path: str, status: int, code: str):
    answer = endless.send(method, path)
    assert (answer.status, answer.error["code"]) == (status, code)


def test_unknown_model(endless: Live):
    for answer in (endless.chat(model="gpt-4"), endless.complete(model="")):
        assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
    assert endless.chat(model=None, max_tokens=1).status == 200
    assert endless.chat(model="root/tiny-test", max_tokens=1).status == 200


@pytest.mark.parametrize("allowed", [False, True])
def test_special_tokens_in_content_are_text_unless_allowed(allowed: bool):
    with live(behaviour(counts), allow_special_in_content=allowed) as server:
        for text, size in (("<|im_end|>", 1 if allowed else 10), ("<think>", 1)):
            messages = [{"role": "user", "content": f"a{text}"}]
            rendered = server.send("POST", "/tokenize", {"messages": messages}).json["tokens"]
            plain = server.send("POST", "/tokenize", {"messages": [{"role": "user", "content": "a"}]}).json["tokens"]
            assert len(rendered) == len(plain) + size
            assert server.chat(messages=messages, max_tokens=1).status == 200
            assert server.engine.submits[-1].tokens == rendered
            raw = server.send("POST", "/tokenize", {"prompt": text}).json
            assert raw["count"] == 1


def test_small_routes(endless: Live):
    assert endless.send("GET", "/version").json["version"]
    (card,) = endless.send("GET", "/v1/models").json["data"]
    assert (card["id"], card["object"], card["max_model_len"], card["root"]) == (MODEL, "model", 2048, "root/tiny-test")
    assert endless.send("GET", f"/v1/models/{MODEL}").json == card
    answer = endless.send("POST", "/tokenize", {"prompt": "the é", "return_token_strs": True}).json
    assert answer["tokens"] == ids("the é") and answer["count"] == len(answer["tokens"])
    assert answer["token_strs"][0] == "the"
    assert endless.send("POST", "/detokenize", {"tokens": answer["tokens"]}).json == {"prompt": "the é"}
    rendered = endless.send("POST", "/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json
    assert endless.chat(max_tokens=1).json["usage"]["prompt_tokens"] == rendered["count"]
    for body in ({"prompt": 7}, {}, {"prompt": "a", "messages": []}, {"model": "other", "prompt": "a"}):
        assert endless.send("POST", "/tokenize", body).status in (400, 404)
    for body in ({}, {"tokens": "a"}, {"tokens": [-1]}, {"tokens": [10**7]}):
        assert endless.send("POST", "/detokenize", body).status == 400
    assert endless.send("POST", "/detokenize", {"tokens": [1] * 2048}).status == 200
    refused = endless.send("POST", "/detokenize", {"tokens": [1] * 2049})
    assert (refused.status, refused.error["param"]) == (400, "tokens") and "at most 2048" in refused.error["message"]
    assert endless.send("POST", "/reset_prefix_cache").json == {"forgotten": 3}
    assert endless.send("POST", "/tokenize", {"prompt": ""}).json["tokens"] == []


def test_tokenize_names_what_it_does_not_know_and_refuses_what_a_chat_refuses(endless: Live):
    header = "x-ridgeline-ignored-fields"
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert header not in endless.send("POST", path, body).headers
        assert endless.send("POST", path, {**body, "max_lenght": 3, "b": None}).headers[header] == "max_lenght, b"
    asked = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function"}]}
    refused = endless.send("POST", "/tokenize", asked)
    assert (refused.status, refused.error["param"]) == (400, "tools[0].function")
    assert refused.error == endless.chat(tools=asked["tools"]).error


def test_metrics_count_what_happened(polite: Live):
    before = polite.send("GET", "/metrics").data.decode()
    polite.chat()
    text = polite.send("GET", "/metrics").data.decode()
    assert text != before
    line = next(line for line in text.splitlines() if line.startswith("ridgeline:request_success_total{"))
    assert 'finished_reason="stop"' in line and float(line.split()[-1]) >= 1


def test_request_ids(endless: Live):
    assert endless.send("GET", "/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    first, second = (endless.send("GET", "/nowhere").headers["x-request-id"] for _ in range(2))
    assert first != second
    assert endless.chat(max_tokens=1, request_id="in-body").headers["x-request-id"] == "in-body"
    assert endless.chat(max_tokens=1, stream=True, headers={"x-request-id": "s"}).headers["x-request-id"] == "s"
    assert endless.send("GET", "/version", headers={"x-request-id": "a b"}).headers["x-request-id"].startswith("req_")


def test_keys():
    with live(behaviour(counts), api_key="säcret") as server:
        assert server.send("GET", "/health").status == 200
        for path in ("/v1/models", "/metrics", "/version", "/nowhere"):
            answer = server.send("GET", path)
            assert (answer.status, answer.error["type"]) == (401, "authentication_error"), path
        for header in ("Bearer wrong", "säcret", "Basic säcret", ""):
            assert server.chat(headers={"Authorization": header.encode().decode("latin-1")}).status == 401
        good = {"Authorization": "Bearer säcret".encode().decode("latin-1")}
        assert server.chat(headers=good, max_tokens=1).status == 200


def test_a_key_that_is_no_text_is_wrong():
    with live(behaviour(counts), api_key="secret") as server:
        assert server.chat(headers={"Authorization": "Bearer \xff\xfe"}).status == 401


@pytest.mark.parametrize("field", ["prompt", "stop_token_ids", "stop"])
def test_a_large_body_is_checked_beside_the_streams(endless: Live, monkeypatch, field: str):
    """Reading the fields of a large body must not hold up the event loop."""
    seen = []
    read = app_module.COMPLETIONS.fields

    def watched(body):
        seen.append(threading.current_thread() is not endless_thread)
        return read(body)

    endless_thread = endless.run(_thread())
    monkeypatch.setattr(app_module, "COMPLETIONS", app_module.COMPLETIONS._replace(fields=watched))
    values = ["a"] * 100_000 if field == "stop" else [1] * 200_000
    assert endless.complete(**{field: values}).status == 400
    assert endless.complete(max_tokens=1).status == 200
    assert seen == [True, False]


def test_many_short_prompts_are_tokenized_beside_the_streams(endless: Live, monkeypatch):
    """Each alone is no work for a thread; a thousand of them held up every stream for seconds."""
    loop, seen = endless.run(_thread()), []
    encode = Tokenizer.encode

    def watched(self, text, **options):
        if text.startswith("b"):  # not what the engine of these tests will say
            seen.append(threading.current_thread() is not loop)
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    assert endless.complete(prompt=["b" * 1000] * 5, max_tokens=1).json["usage"]["prompt_tokens"] == 5000
    assert seen == [True] * 5
    seen.clear()
    assert endless.complete(prompt=["b" * 10] * 5, max_tokens=1).status == 200
    assert seen == [False] * 5
    for words, in_thread in ((["b" * 200] * 40, True), (["b"], False)):
        seen.clear()
        assert endless.complete(bad_words=words, max_tokens=1).status == 200
        assert seen == [in_thread] * len(words)


async def _thread() -> threading.Thread:
    return threading.current_thread()


def test_an_answer_ended_by_a_stop_string_has_its_times():
    """The engine says nothing at such an end; the queue and the decoding took their time all the same."""
    with live(behaviour(says("abcd" * 30), delay=0.002)) as server:
        server.engine.queued = 0.5
        assert server.complete(stop="abcdabcd", max_tokens=100).json["choices"][0]["finish_reason"] == "stop"
        lines = server.send("GET", "/metrics").data.decode().splitlines()
        seen = {line.split("{")[0]: float(line.split()[-1]) for line in lines if "seconds_sum{" in line}
        assert seen["ridgeline:request_queue_time_seconds_sum"] == 0.5
        assert seen["ridgeline:request_decode_time_seconds_sum"] > 0


def test_bodies_have_a_limit():
    with live(behaviour(counts), max_body_mb=0.01) as server:
        answer = server.complete(prompt="x" * 20_000)
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")
        assert server.complete(max_tokens=1).status == 200


def test_what_can_never_fit_is_refused_at_once(endless: Live):
    before = len(endless.engine.submits)
    cases = [
        endless.complete(prompt=[5] * 2048),
        endless.complete(prompt=[5] * 2000, max_tokens=49),
        endless.complete(prompt=[5] * 2048, max_tokens=0, echo=True),
        endless.complete(prompt="x" * 100_000),
        endless.chat(messages=[{"role": "user", "content": "y" * 3000}]),
        endless.chat(max_tokens=4000),
    ]
    for answer in cases:
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded"), answer.data
        assert "2048" in answer.error["message"]
    assert len(endless.engine.submits) == before
    assert endless.complete(prompt=[5] * 2047).json["usage"]["completion_tokens"] == 1


def read_head(sock: socket.socket) -> bytes:
    data = b""
    while b"data: " not in data:
        part = sock.recv(65536)
        assert part, data
        data += part
    return data


def begin(server: Live, path: str = "/v1/completions", **fields) -> socket.socket:
    """A request by hand, so that the client can go at any moment."""
    body = json.dumps({"prompt": "hi", "max_tokens": 1000, **fields}).encode()
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)
    return sock


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("choices", [1, 3])
def test_a_client_that_leaves_ends_its_request(stream: bool, choices: int):
    with live(behaviour(counts, delay=0.005)) as server:
        sock = begin(server, stream=stream, n=choices)
        if stream:
            read_head(sock)
        server.until(lambda: server.engine.submits)
        sock.close()
        server.until(lambda: server.engine.cancels)
        assert [cancel.id for cancel in server.engine.cancels] == [server.engine.submits[0].id]
        server.until(lambda: server.engine.open == 0 and server.server.front.client.open_choices == 0)
        assert 'aborted_requests_total{engine="0",model_name="tiny-test",reason="cancelled"} 1.0' in (
            server.send("GET", "/metrics").data.decode()
        )


def test_a_reader_that_stalls_is_cut_off_and_nobody_else_waits():
    with live(behaviour(counts, max_len=200_000, per_step=500), keep_alive_s=0.5) as server:
        server.server.front.client.max_unread = 20_000
        server.engine.behaviour.script = lambda submit, choice: ids("abc") * 50_000
        sock = begin(server, stream=True, max_tokens=150_000, logprobs=5)
        server.until(lambda: server.engine.cancels)
        assert server.engine.cancels[0].reason == "slow_reader"
        server.until(lambda: server.engine.open == 0)
        assert server.complete(max_tokens=3).status == 200
        data = b""
        while b"[DONE]" not in data and b'"error"' not in data:
            part = sock.recv(1 << 20)
            if not part:
                break
            data += part
        assert b"reads too slowly" in data
        sock.close()


def test_a_client_that_takes_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(answer_module, "SLOW_WRITE_S", 0.2)
    with live(behaviour(counts, max_len=200_000, per_step=50)) as server:
        server.engine.behaviour.script = lambda submit, choice: ids("abc") * 50_000
        server.server.front.client.max_unread = 10**9
        sock = begin(server, stream=True, max_tokens=150_000, logprobs=5)
        server.until(lambda: server.engine.submits)
        server.until(lambda: server.server.front.active == 0, timeout=10)
        assert server.complete(max_tokens=3).status == 200
        sock.close()


def test_a_silent_stream_is_kept_alive():
    with live(behaviour(says("a"), delay=0.3), keep_alive_s=0.05) as server:
        data = server.complete(stream=True).data
        assert data.startswith(b": keep-alive\n\n")
        assert b'"text":"a"' in data


def test_a_full_queue_answers_429():
    with live(behaviour(counts, rows=1, delay=0.01), max_queue=1) as server:
        held = [begin(server, stream=True), begin(server, stream=True)]
        server.until(lambda: len(server.engine.submits) == 2)
        answer = server.complete()
        assert (answer.status, answer.error["code"], answer.error["type"]) == (
            429,
            "rate_limit_exceeded",
            "rate_limit_error",
        )
        assert int(answer.headers["retry-after"]) >= 1
        assert int(answer.headers["retry-after-ms"]) > 0
        assert server.send("GET", "/health").status == 200
        for sock in held:
            sock.close()
        server.until(lambda: server.engine.open == 0)
        assert server.complete(max_tokens=2).status == 200


def test_the_gate_computes_when_to_come_back():
    now = [0.0]
    gate = Gate(max_queue=4, rows=8, clock=lambda: now[0])
    assert gate.retry_after(4) == 1.0
    for _ in range(200):
        now[0] += 0.1
        gate.ended()
    assert gate.retry_after(4) == pytest.approx(0.1, rel=0.3)
    assert gate.retry_after(40) == pytest.approx(3.7, rel=0.3)
    gate.admit(11, 0)
    for open_choices, waiting in ((12, 0), (5, 4)):
        with pytest.raises(Exception, match="queue is full"):
            gate.admit(open_choices, waiting)
    gate.admit(0, 50)


def test_a_full_queue_of_one_client_does_not_shut_out_another():
    gate = Gate(max_queue=10, rows=2)
    gate.began(12, "crowd")
    for client, in_flight in (("crowd", 0), ("single", 5)):  # the share of each of two clients is 5
        for choices in range(in_flight):
            gate.admit(12 + choices, 10 + choices, client)
            gate.began(1, client)
        with pytest.raises(Exception, match="queue is full"):
            gate.admit(12 + in_flight, 10 + in_flight, client)
    gate.ended(5, "single")
    gate.admit(12, 10, "third")
    gate.ended(12, "crowd")
    gate.admit(11, 0)


def test_a_dead_engine_is_told_to_everyone():
    with live(behaviour(counts, die_after=20, delay=0.002)) as server:
        answer = server.complete(stream=True, max_tokens=1000)
        *_, last = [line for line in answer.data.decode().split("\n\n") if line]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["type"] == "server_error"
        health = server.send("GET", "/health")
        assert health.status == 503 and "ended" in health.error["message"]
        later = server.complete()
        assert (later.status, later.error["code"]) == (503, "unavailable")
        assert server.send("GET", "/metrics").status == 200


def test_a_dead_engine_ends_single_bodies_too():
    with live(behaviour(counts, die_after=20, last_word="out of memory.")) as server:
        answer = server.complete(max_tokens=1000)
        assert answer.status == 500 and "out of memory" in answer.error["message"]
        assert "out of memory" in server.send("GET", "/health").error["message"]


def test_missing_frames_are_a_failure():
    with live(behaviour(counts, skip_frame=True)) as server:
        answer = server.complete(max_tokens=1000)
        assert answer.status == 500 and "missing" in answer.error["message"]
        assert server.send("GET", "/health").status == 503


@pytest.mark.parametrize("stream", [True, False])
def test_a_failed_step_ends_its_request_only(stream: bool):
    with live(behaviour(counts, fail_after=3)) as server:
        answer = server.complete(stream=stream)
        assert b"The step failed" in answer.data
        if stream:
            assert answer.status == 200 and b'"text":"a"' in answer.data and b"[DONE]" not in answer.data
        else:
            assert answer.status == 500
        server.engine.behaviour.fail_after = None
        assert server.complete(max_tokens=2).status == 200


def test_a_failure_before_the_first_token_has_its_own_status():
    with live(behaviour(counts, fail_after=0)) as server:
        assert server.complete(stream=True).status == 500


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({}, None, None),
        ({"guided_regex": "a+"}, "invalid_grammar", "guided_regex"),
    ],
)
def test_what_the_engine_refuses_names_a_grammars_field_only_where_there_is_one(fields: dict, code, param):
    with live(behaviour(counts, fail_after=0, fails_as="refused")) as server:
        for answer in (server.complete(**fields), server.chat(**fields)):
            assert (answer.status, answer.error["code"], answer.error["param"]) == (400, code, param)


def test_loading_then_ready():
    with live(behaviour(counts, loading=True)) as server:
        health = server.send("GET", "/health")
        server.until(lambda: server.server.front.client.loading)
        health = server.send("GET", "/health")
        assert health.status == 503 and "weights 1/3" in health.error["message"]
        assert server.chat().status == 503
        assert server.chat().headers["retry-after"]
        server.loop.call_soon_threadsafe(server.engine.ready)
        server.until(lambda: server.server.front.trouble is None)
        assert server.chat(max_tokens=1).status == 200


def test_health_proves_progress():
    with live(behaviour(counts)) as server:
        client = server.server.front.client
        assert server.send("GET", "/health").status == 200
        server.engine.behaviour.stuck = True
        sock = begin(server)
        server.until(lambda: server.engine.submits)
        client.last_progress -= 1000
        answer = server.send("GET", "/health")
        assert answer.status == 503 and "has not finished a step" in answer.error["message"]
        sock.close()


def test_drain_lets_what_runs_finish():
    with live(behaviour(counts, delay=0.005), drain_s=5.0) as server:
        sock = begin(server, stream=True, max_tokens=60)
        read_head(sock)

        async def stop() -> None:
            server.loop.create_task(server.server.stop())

        server.run(stop())
        answer = server.complete()
        assert answer.status == 503 and answer.headers["retry-after"]
        assert server.send("GET", "/health").status == 503
        data = b""
        while part := sock.recv(65536):
            data += part
        assert b"[DONE]" in data


def test_drain_ends_what_takes_too_long_with_an_error():
    with live(behaviour(counts, delay=0.01), drain_s=0.1) as server:
        sock = begin(server, stream=True, max_tokens=1000)
        read_head(sock)
        server.run(server.server.stop())
        data = b""
        while part := sock.recv(65536):
            data += part
        assert b"shutting down" in data and b"[DONE]" not in data and b'"code":"unavailable"' in data
        server.until(lambda: server.engine.cancels)


def test_a_body_that_the_drain_cuts_off_is_told_to_go_elsewhere():
    with live(behaviour(counts, delay=0.01), drain_s=0.1) as server:
        sock = begin(server, stream=False, max_tokens=1000)
        server.until(lambda: server.engine.submits)
        server.run(server.server.stop())
        data = b""
        while part := sock.recv(65536):
            data += part
        head = data.lower()
        assert head.startswith(b"http/1.1 503") and b"retry-after:" in head and b'"code":"unavailable"' in data


def test_abuse_leaves_a_server_that_answers():
    """Everything at once, and at the end nothing is held and the next request is answered."""
    with live(behaviour(counts, rows=2, delay=0.001), max_queue=4, max_body_mb=0.5) as server:
        socks = []
        for round_number in range(10):
            socks.append(begin(server, stream=bool(round_number % 2), n=1 + round_number % 3))
            socks.append(begin(server, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}]))
            garbage = socket.create_connection(("127.0.0.1", server.port), timeout=10)
            garbage.sendall(JSON_HEAD + b"Content-Length: 999\r\n\r\n{")
            socks.append(garbage)
            assert server.send("POST", "/v1/completions", BODIES[round_number]).status == 400
            assert server.complete(prompt="x" * 100_000).status in (400, 429)
            assert server.complete(prompt="x" * 600_000).status == 413
        raw = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        raw.sendall(b"\x16\x03\x01nonsense\r\n\r\n")
        assert b"400" in raw.recv(1000)
        for sock in [*socks, raw]:
            sock.close()
        server.until(lambda: server.engine.open == 0 and server.server.front.client.open_choices == 0)
        server.until(lambda: server.server.front.active == 0)
        assert server.complete(max_tokens=5).json["choices"][0]["text"] == "abcab"
        stats = server.run(server.server.front.client.control("stats"))
        assert stats["free"] + stats["used"] == stats["total"] and stats["used"] == 0
