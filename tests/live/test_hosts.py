"""A served model over two hosts, both of which are this one, when a process of the other host is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ridgeline.core.config import EngineConfig
from ridgeline.engine.hosts import attach
from ridgeline.models.hub import shipped_model

from ..engine.test_hosts import free_port, second_host
from .served import TIMEOUT_S, served
from .test_death import begun, failed, gone


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.long
def test_a_rank_of_another_host_that_is_lost_comes_back(tmp_path: Path):
    """Killed, then stopped, in the middle of answers: they end with the reason within seconds, and the service goes on."""
    sizes = EngineConfig(tensor_parallel_size=2, nnodes=2, master_addr="127.0.0.1", master_port=free_port())
    place = ("--nnodes", "2", "--master-addr", sizes.master_addr, "--master-port", str(sizes.master_port))
    with (
        second_host(sizes, shipped_model()) as other,
        served(tmp_path, "--max-model-len", "4096", "-tp", "2", *place) as server,
    ):
        for number, blow in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
            (follower,) = children(other.pid)
            asking = begun(server, 3)
            os.kill(follower, blow)
            began = time.monotonic()
            failed(asking)
            assert time.monotonic() - began < 8.0  # 5 s and the pace of a busy machine
            if blow == signal.SIGSTOP:
                os.kill(follower, signal.SIGCONT)  # it finds that nobody needs it, and its host starts another
            deadline = time.monotonic() + TIMEOUT_S
            while server.log.read_text().count("ready again") < number:
                assert time.monotonic() < deadline, server.log.read_text()
                time.sleep(0.02)
            assert gone(follower) and server.complete(max_tokens=8).status == 200
        assert "A rank of the model is lost: rank 1 has sent nothing for 4 s." in server.log.read_text()


@pytest.mark.long
def test_an_engine_that_waits_for_hosts_ends_with_its_service():
    port = str(free_port())
    place = ("--nnodes", "2", "-tp", "2", "--master-addr", "127.0.0.1", "--master-port", port)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-m", "ridgeline", "serve", str(shipped_model()), "--port", "0", *place]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment) as process:
        attach(f"127.0.0.1:{port}", 0).close()  # it is no missing rank; the engine listens
        (engine,) = children(process.pid)
        process.kill()
    assert gone(engine)
