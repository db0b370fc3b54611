"""`ridgeline up` with real servers of the model that ships."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from .served import TIMEOUT_S, Served, served

FILE = {"serve": {"threads": 1, "max_num_seqs": 8, "dtype": "float32"}, "router": {"port": 0, "drain_s": 20.0}}


@contextmanager
def fleet(folder: Path, **content: Any) -> Iterator[Served]:
    path = folder / "fleet.json"
    path.write_text(json.dumps({**FILE, **content}))
    with served(folder, command=("up", str(path))) as running:
        yield running


def replicas(server: Served) -> list[dict[str, Any]]:
    return server.send("GET", "/admin/replicas").json["data"]


def until_all_are_up(server: Served) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while any(replica["state"] != "up" for replica in replicas(server)):
        assert time.monotonic() < deadline, server.log.read_text()
        time.sleep(0.02)


class Load:
    """Streams, one after the other in each of two threads, until it is stopped. ended: status and last bytes of each."""

    def __init__(self, server: Served) -> None:
        self.server = server
        self.ended: list[tuple[int, bytes]] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(2)]

    def _run(self) -> None:
        while not self._stop.is_set():
            reply = self.server.complete(max_tokens=40, stream=True, ignore_eos=True)
            self.ended.append((reply.status, reply.data[-14:]))

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def test_two_servers_answer_alike_and_one_may_die(tmp_path: Path) -> None:
    with fleet(tmp_path, replicas=2, router={**FILE["router"], "policy": "round-robin"}) as server:
        until_all_are_up(server)
        answers = [server.complete(max_tokens=8, temperature=0) for _ in range(8)]
        assert len({answer.headers["x-ridgeline-replica"] for answer in answers}) == 2
        assert len({answer.json["choices"][0]["text"] for answer in answers}) == 1
        assert server.send("GET", "/v1/models").json["data"][0]["id"] == "ridgeline-14m"
        os.kill(server.children()[0], signal.SIGKILL)
        answers = [server.complete(max_tokens=8, temperature=0) for _ in range(8)]
        assert {answer.status for answer in answers} == {200}
        server.until_logged("it is started again")


@pytest.mark.long
def test_replicas_are_replaced_under_load_and_end_with_the_fleet(tmp_path: Path) -> None:
    with fleet(tmp_path, replicas=2) as server:
        with Load(server) as load:
            server.process.send_signal(signal.SIGHUP)
            server.until_logged("all replicas are replaced")
        assert len(load.ended) > 10 and set(load.ended) == {(200, b"data: [DONE]\n\n")}
        assert sorted(row["name"] for row in replicas(server)) == ["replica-2", "replica-3"]
        os.kill(server.children()[0], signal.SIGKILL)
        server.until_logged(
            "replica-2 is ready" if "replica-2: its" in server.log.read_text() else "replica-3 is ready"
        )
        server.process.kill()
        server.process.wait()


@pytest.mark.long
def test_a_hung_replica_gets_nothing_and_streams_go_on_elsewhere(tmp_path: Path) -> None:
    with fleet(tmp_path, replicas=2) as server:
        for name in ("replica-0 is ready", "replica-1 is ready"):
            server.until_logged(name)
        hung = server.children()[0]
        os.kill(hung, signal.SIGSTOP)
        try:
            answers = [server.complete(max_tokens=4) for _ in range(12)]
            assert {answer.status for answer in answers} == {200}
            assert "down" in {row["state"] for row in replicas(server)}
        finally:
            os.kill(hung, signal.SIGCONT)
