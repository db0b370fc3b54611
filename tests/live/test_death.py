"""The whole program ends well: SIGTERM drains, and neither process outlives the other for nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from ..service.live import Reply
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


def test_a_killed_engine_is_told_and_the_service_still_stops(tmp_path: Path):
    """Two stream answers of thousands of tokens, three wait; none may look like an answer that came to its end."""
    with served(tmp_path, "--max-model-len", "4096", "--max-num-seqs", "2") as server:
        engine = server.engine_pid
        asking = [Asking(server, max_tokens=4000) for _ in range(5)]
        while not any(one.begun.wait(0.01) for one in asking):
            assert all(one.is_alive() for one in asking)
        os.kill(engine, signal.SIGKILL)
        for one in asking:
            one.join(TIMEOUT_S)
            assert b'"error"' in one.data and b"[DONE]" not in one.data
        health = server.send("GET", "/health")
        assert health.status == 503 and "SIGKILL" in health.error["message"]
        later: Reply = server.complete()
        assert (later.status, later.error["code"]) == (500, "engine_failed")
        assert server.send("GET", "/version").status == server.send("GET", "/metrics").status == 200
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
