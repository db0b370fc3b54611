"""A `ridgeline serve` process with its engine process and the model that ships, and a client that may do anything to it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..service.live import Reply, json_headers

MODEL = "ridgeline-14m"
TIMEOUT_S = 60.0
"""Whatever takes longer hangs."""
MARK = "TESTED_SERVER"
"""Environment variable that names the log of the server that a process belongs to."""

_LISTENING = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")


@dataclass
class Served:
    """A running server."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine_pid(self) -> int:
        """Of the one child process."""
        (child,) = self.children()
        return child

    def children(self) -> list[int]:
        """Process ids of the engine and of what else the server has started, the oldest first."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def processes(self) -> list[int]:
        """Ids of all processes that run because of this server, whoever their parent is by now."""
        mark = f"{MARK}={self.log}".encode()
        running = []
        for folder in Path("/proc").iterdir():
            # One that is ending may be gone between two looks, or have no environment any more.
            with suppress(OSError):
                if folder.name.isdecimal() and mark in (folder / "environ").read_bytes().split(b"\0"):
                    running.append(int(folder.name))
        return running

    def until_logged(self, text: str) -> str:
        """Wait until the log has `text`; returns the log."""
        deadline = time.monotonic() + TIMEOUT_S
        while text not in (log := self.log.read_text()):
            assert time.monotonic() < deadline, log
            time.sleep(0.01)
        return log

    @property
    def memory(self) -> dict[str, float]:
        """Resident MB of both processes."""
        return {"front": resident(self.process.pid), "engine": resident(self.engine_pid)}

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)

    def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        """One request on a connection of its own. Raises TimeoutError when no answer comes."""
        connection = self.connect()
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, json_headers(method, headers))
            response = connection.getresponse()
            values = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, values, response.read())
        finally:
            connection.close()

    def chat(self, text: str = "Hello!", **fields: Any) -> Reply:
        body = {"messages": [{"role": "user", "content": text}], **fields}
        return self.send("POST", "/v1/chat/completions", body)

    def complete(self, prompt: Any = "Once upon a time", **fields: Any) -> Reply:
        return self.send("POST", "/v1/completions", {"prompt": prompt, **fields})

    def raw(self, data: bytes) -> socket.socket:
        """A connection on which these bytes have been sent."""
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S)
        sock.sendall(data)
        return sock

    def exchange(self, data: bytes) -> bytes:
        """Everything the server answers to these bytes until it closes the connection."""
        answer = b""
        with suppress(ConnectionError), self.raw(data) as sock:
            while part := sock.recv(1 << 16):
                answer += part
        return answer

    def begin(self, path: str = "/v1/completions", **fields: Any) -> socket.socket:
        """A request by hand, so that its client can stop reading, or go, at any moment; the end of the answer is the
        connection's."""
        body = json.dumps(fields).encode()
        return self.raw(post(path, body, "Connection: close"))

    def stats(self) -> dict[str, Any]:
        return self.send("GET", "/admin/stats").json

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        lines = self.send("GET", "/metrics").data.decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if re.match(rf"ridgeline:{name}[{{ ]", line))

    def rest(self) -> dict[str, Any]:
        """Wait until nothing runs or waits; returns the engine's numbers, which add up at every moment."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            stats = self.stats()
            assert stats["free"] + stats["used"] == stats["total"]
            if stats["running"] == stats["waiting"] == 0 or time.monotonic() > deadline:
                return stats
            time.sleep(0.02)

    def until_ready(self) -> None:
        """Raises AssertionError with the log of a server that did not come up."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            with suppress(ConnectionError):
                if self.send("GET", "/health").status == 200:
                    return
            assert time.monotonic() < deadline and self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)


def post(path: str, body: bytes, *lines: str) -> bytes:
    """A whole POST of JSON as bytes. lines: further lines of its head."""
    head = (f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *lines)
    return "\r\n".join((*head, f"Content-Length: {len(body)}", "", "")).encode() + body


def resident(pid: int, name: str = "VmRSS") -> float:
    """MB of a process: VmRSS now, VmHWM at the highest."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) / 1000  # type: ignore[index]


def growth(server: Served, work: Callable[[], object]) -> float:
    """MB by which the front process rises above its start while `work` runs, at the highest."""
    pid = server.process.pid
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak counts from here
    before = resident(pid)
    work()
    return resident(pid, "VmHWM") - before


@contextmanager
def bounded_growth(server: Served, most_mb: float = 100.0) -> Iterator[None]:
    """Neither process is larger by more than `most_mb` after the block."""
    before = server.memory
    yield
    after = server.memory
    assert all(after[name] - before[name] <= most_mb for name in before), (before, after)


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    """The port a server has chosen, from what it prints."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (match := _LISTENING.search(log.read_text())):
        assert time.monotonic() < deadline and process.poll() is None, log.read_text()
        time.sleep(0.02)
    return int(match[1])


def refused(reply: Reply, status: int = 400, param: str = "") -> None:
    """A refusal with its four keys, that names the field."""
    assert reply.status == status, reply.data[:300]
    error = reply.error
    assert error["message"] and error["type"]
    assert (error["param"] or "").startswith(param), error


@contextmanager
def served(
    folder: Path,
    *flags: str,
    command: tuple[str, ...] = ("serve", "--port", "0", "--threads", "1"),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Served]:
    """A server on a free port, ready, from its start to its end, after which none of its processes runs. `folder`: for its log.
    variables: of its environment."""
    log = folder / "serve.log"
    command = (sys.executable, "-m", "ridgeline", *command, *flags)
    environment = {**_environment(), **variables, MARK: str(log)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment)
    try:
        server = Served(process, _port(process, log), log)
        server.until_ready()
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
    deadline = time.monotonic() + TIMEOUT_S
    while left := server.processes():
        assert time.monotonic() < deadline, f"processes {left} have outlived their server"
        time.sleep(0.02)


def _environment() -> dict[str, str]:
    """This process's, with its import path, and without anything that changes what a terminal is told."""
    kept = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "COLUMNS")}
    return {**kept, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), "HF_HUB_OFFLINE": "1"}
