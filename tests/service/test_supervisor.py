"""An engine that is lost is replaced: what callers see meanwhile, how often it may happen, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import threading
from collections.abc import Callable

import pytest

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import EngineFailed
from ridgeline.service.supervisor import Supervisor
from ridgeline.wire.client import SILENCE_S

from .live import Live, behaviour, counts, live
from .test_robust import begin, read_head


def metric(server: Live, name: str) -> float:
    line = re.search(rf"^ridgeline:{name}{{[^}}]*}} (\S+)$", server.get("/metrics").data.decode(), re.M)
    assert line, name
    return float(line[1])


def lose_engine(server: Live) -> None:
    """End the present engine without a word, and wait until the server knows."""
    count = len(server.heard.words)
    server.run(server.engines.processes[-1].engine.die())
    server.until(lambda: len(server.heard.words) > count or server.keeping.done())


def rest_of(sock: socket.socket) -> bytes:
    data = b""
    while part := sock.recv(65536):
        data += part
    return data


# --- what callers see ---------------------------------------------------------------------------------------------------


def test_while_the_engine_is_restarted_its_routes_answer_503_and_the_others_go_on() -> None:
    with live(behaviour(counts)) as server:
        assert server.complete(max_tokens=2).status == 200
        lose_engine(server)
        for answer in (
            server.complete(),
            server.chat(stream=True),
            server.get("/v1/models"),
            server.get("/admin/stats"),
            server.send("POST", "/reset_prefix_cache"),
        ):
            assert (answer.status, answer.error["code"], answer.error["type"]) == (
                503,
                "unavailable",
                "service_unavailable",
            )
            assert int(answer.headers["retry-after"]) >= 1 and answer.headers["x-ridgeline-engine"] == "starting"
            assert "the engine is being restarted" in answer.error["message"]
            assert "the engine process has ended" in answer.error["message"]
        health = server.get("/health")
        assert health.status == 503 and "the engine process has ended" in health.error["message"]
        assert health.headers["x-ridgeline-engine"] == "starting"
        for path in ("/metrics", "/version", "/dashboard", "/chat", "/requests", "/dashboard/data"):
            assert server.get(path).status == 200, path
        assert server.get("/dashboard/data").json["healthy"] is False
        assert metric(server, "engine_restarts_total") == 1


def test_after_a_restart_all_works_and_nothing_of_the_lost_engine_is_left() -> None:
    with live(behaviour(counts)) as server:
        server.complete(max_tokens=3)
        before = server.server.front.service()
        before.gate.ended()
        lose_engine(server)
        engine = server.replace_engine()
        after = server.server.front.service()
        assert after.gate is not before.gate and after.gate.retry_after(5000) == 1.0, "its rate is measured anew"
        assert server.complete(max_tokens=4).json["choices"][0]["text"] == "abca"
        assert server.chat(stream=True, max_tokens=4).events
        assert server.get("/admin/stats").json["free"] == 10 and engine.orders == ["stats"]
        assert server.get("/health").json["step"] >= 0
        assert after.client is not before.client and after.client is server.server.front.client
        assert (after.grammars, after.card) == (before.grammars, before.card)
        assert metric(server, "generation_tokens_total") == 11, "the counters go on"
        assert metric(server, "request_generation_tokens_count") == 3, "and so do the histograms"
        assert server.heard.words[0].startswith("restarting: the engine process has ended")
        assert server.heard.words[1:] == [f"restarted: {server.server.url}"]

        async def readers() -> int:
            return sum(task.get_name() == "engine-client" for task in asyncio.all_tasks())

        assert server.run(readers()) == 1
        first = server.engines.processes[0]
        assert first.killed and first.writer.is_closing()


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_in_flight_gets_one_error(stream: bool) -> None:
    with live(behaviour(counts, delay=0.005)) as server:
        socks = [begin(server, stream=stream, n=count) for count in (1, 3)]
        server.until(lambda: server.server.front.client.open_choices == 4)
        if stream:
            for sock in socks:
                read_head(sock)
        lose_engine(server)
        for sock in socks:
            sock.settimeout(10)
            data = b""
            while b'"error"' not in data or (stream and not data.endswith(b"0\r\n\r\n")):
                data += sock.recv(65536)
            assert data.count(b'"error"') == 1 and b"[DONE]" not in data
            assert b'"engine_failed"' in data and b"the engine process has ended" in data
            assert stream or data.startswith(b"HTTP/1.1 500")
            sock.close()
        assert metric(server, "num_requests_running") == 0


def test_a_request_that_waits_for_its_body_while_the_engine_is_lost_is_answered() -> None:
    """It got its service before the loss and comes to the engine after it."""
    with live(behaviour(counts)) as server:
        body = json.dumps({"prompt": "hi", "max_tokens": 2}).encode()
        sock = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        sock.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n".encode())
        server.until(lambda: server.server.front.active == 1)
        lose_engine(server)
        sock.sendall(body)
        assert sock.recv(65536).startswith(b"HTTP/1.1 503")
        sock.close()


# --- when, and how often ------------------------------------------------------------------------------------------------


def test_a_loss_is_logged_at_once_also_when_idle(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), live(behaviour(counts, last_word="out of memory.")) as server:
        lose_engine(server)
        (record,) = [record for record in caplog.records if record.name == "ridgeline.service.supervisor"]
        assert record.levelno == logging.ERROR
        assert record.getMessage() == "The engine is lost: out of memory. It is restarted (1 of 3 restarts)."


def test_a_silent_engine_is_killed_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """It beats once and never again."""
    plan = behaviour(counts, beat_s=3600, silence_s=0.2)
    with live(plan) as server:
        server.until(lambda: server.heard.words)
        assert "the engine has been silent" in caplog.text
        plan.silence_s = SILENCE_S
        server.replace_engine()
        assert server.engines.processes[0].killed
        assert server.complete(max_tokens=3).status == 200


def test_an_engine_that_fails_while_it_is_loaded_again_is_a_further_loss() -> None:
    plan = behaviour(counts)
    with live(plan, engine_restarts=2) as server:
        lose_engine(server)
        plan.loading, plan.last_word = True, "the weights are gone."
        for count in (2, 3):
            server.loop.call_soon_threadsafe(server.engines.allowed.set)
            server.until(lambda count=count: len(server.engines.processes) == count)
            assert "being restarted" in server.complete().error["message"]
            lose_engine(server)
        assert server.keeping.done() and isinstance(server.keeping.exception(), EngineFailed)
        assert "the weights are gone" in str(server.keeping.exception())
        assert "--engine-restarts 2" in str(server.keeping.exception())
        assert len(server.engines.processes) == 3 and all(process.killed for process in server.engines.processes)
        assert metric(server, "engine_restarts_total") == 2
        assert server.heard.words[-1] == "restarting: the weights are gone"


def test_without_restarts_the_first_loss_is_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), live(behaviour(counts), engine_restarts=0) as server:
        lose_engine(server)
        assert isinstance(server.keeping.exception(), EngineFailed)
        assert server.heard.words == []
        assert "No restart is left" in caplog.text
        answer = server.complete()
        assert (answer.status, answer.error["code"]) == (503, "unavailable")
        assert "restarted" not in answer.error["message"] and "has ended" in answer.error["message"]


class _Lost:
    """An engine that is lost as soon as anybody waits for it."""

    def __init__(self) -> None:
        self.client = self
        self.killed = False

    async def wait_lost(self) -> str:
        return "it was killed."

    async def close(self) -> None: ...

    async def kill(self) -> None:
        self.killed = True

    stop = kill


@pytest.fixture
def clock() -> Callable[[float], None]:
    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return self.now

    return Clock()


async def test_restarts_count_for_some_minutes(clock) -> None:
    async def start() -> _Lost:
        return _Lost()

    supervisor = Supervisor(_Lost(), start, ServiceConfig(engine_restarts=2, engine_restart_minutes=5.0), clock)
    for clock.now in (0.0, 100.0, 301.0, 401.0):  # of any three within five minutes
        assert await supervisor.wait_lost() == "it was killed"
        lost = supervisor.engine
        await supervisor.restart()
        assert lost.killed and supervisor.engine is not lost
    clock.now = 600.0
    with pytest.raises(EngineFailed, match=r"it was killed. --engine-restarts 2 \(within --engine-restart-minutes 5\)"):
        await supervisor.wait_lost()
    assert supervisor.engine.killed


# --- the end of the server ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loading", [False, True])
def test_the_server_stops_while_the_engine_is_restarted(loading: bool) -> None:
    """Before the next engine process has begun, and while it loads."""
    plan = behaviour(counts)
    with live(plan) as server:
        lose_engine(server)
        if loading:
            plan.loading = True
            server.loop.call_soon_threadsafe(server.engines.allowed.set)
            server.until(lambda: len(server.engines.processes) == 2)
    assert all(process.writer.is_closing() for process in server.engines.processes)
    assert server.engines.processes[-1].engine.writer.is_closing()


def test_a_drain_ends_although_the_engine_is_lost_in_it() -> None:
    with live(behaviour(counts, delay=0.005), drain_s=30.0) as server:
        sock = begin(server, stream=True)
        read_head(sock)
        stopping = threading.Thread(target=lambda: server.run(server.server.stop(), 20))
        server.loop.call_soon_threadsafe(server.keeping.cancel)
        stopping.start()
        server.until(lambda: server.server.front.draining)
        server.run(server.engine.die())
        assert b'"error"' in rest_of(sock)
        stopping.join(20)
        assert not stopping.is_alive()
