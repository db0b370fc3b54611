"""The whole program ends well: SIGTERM drains, a killed engine comes back, and no process outlives the server."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from .served import TIMEOUT_S, Served, served

LONG = {"ignore_eos": True, "temperature": 0, "stream": True}


def alive(pid: int) -> bool:
    """Whether a process runs (one that has ended and was not waited for does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int) -> bool:
    deadline = time.monotonic() + TIMEOUT_S
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


class Asking(threading.Thread):
    """A request in a thread; it has begun when its first bytes are there."""

    def __init__(self, server: Served, max_tokens: int = 300) -> None:
        super().__init__()
        self._server = server
        self._options = LONG | {"max_tokens": max_tokens}
        self.data = b""
        self.begun = threading.Event()
        self.start()

    def run(self) -> None:
        sock = self._server.begin(prompt="Once upon a time", **self._options)
        while part := sock.recv(1 << 16):
            self.data += part
            self.begun.set()
        sock.close()


def test_sigterm_lets_answers_finish(tmp_path: Path):
    with served(tmp_path, "--max-model-len", "512") as server:
        engine = server.engine_pid
        asking = Asking(server)
        assert asking.begun.wait(TIMEOUT_S)
        server.process.send_signal(signal.SIGTERM)
        asking.join(TIMEOUT_S)
        assert b"data: [DONE]" in asking.data and b'"error"' not in asking.data
        assert asking.data.count(b'"text":') >= 250
        assert server.process.wait(TIMEOUT_S) == 0
        assert gone(engine)


def begun(server: Served, count: int) -> list[Asking]:
    """Requests for thousands of tokens, of which at least one is being answered."""
    asking = [Asking(server, max_tokens=4000) for _ in range(count)]
    while not any(request.begun.wait(0.01) for request in asking):
        assert all(request.is_alive() for request in asking)
    return asking


def failed(asking: list[Asking]) -> None:
    """Every request ends with one error, and none looks like an answer that came to its end."""
    for request in asking:
        request.join(TIMEOUT_S)
        assert request.data.count(b'"error"') == 1 and b"[DONE]" not in request.data


@pytest.mark.long
def test_an_engine_that_is_killed_while_idle_comes_back(tmp_path: Path):
    with served(tmp_path, "--max-model-len", "512", "--dtype", "float32") as server:
        text = server.complete(max_tokens=16, temperature=0).json["choices"][0]["text"]
        first = server.engine_pid
        os.kill(first, signal.SIGKILL)
        log = server.until_logged("restarting the engine")
        assert "ERROR ridgeline.service.supervisor: The engine is lost: the engine process was ended by SIGKILL" in log
        server.until_logged("ready again")
        assert server.send("GET", "/health").status == 200
        assert server.engine_pid != first and gone(first)
        assert server.complete(max_tokens=16, temperature=0).json["choices"][0]["text"] == text
        assert server.metric("engine_restarts_total") == 1
        assert server.rest()["used"] == 0
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(TIMEOUT_S) == 0


@pytest.mark.long
def test_an_engine_that_is_killed_with_requests_in_flight_comes_back(tmp_path: Path):
    """Two stream answers of thousands of tokens, three wait."""
    with served(tmp_path, "--max-model-len", "4096", "--max-num-seqs", "2") as server:
        asking = begun(server, 5)
        os.kill(server.engine_pid, signal.SIGKILL)
        failed(asking)
        server.until_logged("restarting the engine")  # until then, refusals name the loss alone
        health, later = server.send("GET", "/health"), server.complete()
        assert health.status == 503 and "SIGKILL" in health.error["message"]
        assert (later.status, later.error["code"]) == (503, "unavailable") and later.headers["retry-after"]
        assert "the engine is being restarted" in later.error["message"] and "SIGKILL" in later.error["message"]
        assert server.send("GET", "/version").status == server.send("GET", "/metrics").status == 200
        server.until_logged("ready again")
        asking = begun(server, 2)
        os.kill(server.engine_pid, signal.SIGKILL)
        failed(asking)
        server.until_ready()
        assert server.complete(max_tokens=4).status == 200
        assert server.metric("engine_restarts_total") == 2 and server.metric("num_requests_running") == 0


@pytest.mark.long
@pytest.mark.parametrize("restarts", [0, 1])
def test_an_engine_that_is_killed_too_often_ends_the_server(tmp_path: Path, restarts: int):
    with served(tmp_path, "--max-model-len", "4096", "--engine-restarts", str(restarts)) as server:
        for _ in range(restarts):
            os.kill(server.engine_pid, signal.SIGKILL)
            server.until_logged("ready again")
        asking = begun(server, 2)
        os.kill(server.engine_pid, signal.SIGKILL)
        failed(asking)
        assert server.process.wait(TIMEOUT_S) == 1
        log = server.log.read_text()
        assert "No restart is left: the server ends" in log and log.count("restarting the engine") == restarts
        assert "ridgeline: the engine is lost: the engine process was ended by SIGKILL" in log
        assert f"--engine-restarts {restarts} (within --engine-restart-minutes 10) allows no further restart." in log


@pytest.mark.long
def test_sigterm_ends_a_restart(tmp_path: Path):
    with served(tmp_path, "--max-model-len", "512") as server:
        os.kill(server.engine_pid, signal.SIGKILL)
        server.until_logged("restarting the engine")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(TIMEOUT_S) == 0
        assert "ready again" not in server.log.read_text()


@pytest.mark.long
def test_sigterm_ends_the_loading_of_a_restart(tmp_path: Path):
    with served(tmp_path, "--max-model-len", "512") as server:
        first = server.engine_pid
        os.kill(first, signal.SIGKILL)
        while not set(server.processes()) - {server.process.pid, first}:
            time.sleep(0.005)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(TIMEOUT_S) == 0


def test_an_engine_does_not_outlive_its_service(tmp_path: Path):
    with served(tmp_path, "--max-model-len", "512") as server:
        engine = server.engine_pid
        asking = Asking(server)
        assert asking.begun.wait(TIMEOUT_S)
        server.process.kill()
        assert gone(engine)
        asking.join(TIMEOUT_S)


@pytest.mark.long
def test_a_rank_that_is_killed_with_requests_in_flight_comes_back(tmp_path: Path):
    with served(tmp_path, "--max-model-len", "4096", "--tensor-parallel-size", "2") as server:
        (follower,) = set(server.processes()) - {server.process.pid, server.engine_pid, *server.children()}
        asking = begun(server, 3)
        os.kill(follower, signal.SIGKILL)
        failed(asking)
        log = server.until_logged("ready again")
        assert "A rank of the model is lost: rank 1 has ended with status -9." in log
        assert gone(follower) and server.complete(max_tokens=8).status == 200
        assert server.metric("engine_restarts_total") == 1
