"""A server whose engine for prompts joins from another host, which is this one: killed and stopped engines, a wrong secret."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from ridgeline.models.hub import shipped_model

from ..engine.test_hosts import free_port
from .served import TIMEOUT_S, served
from .test_hosts import children
from .test_prefill_decode import FLAGS, PROMPT, ask, ready, until

pytestmark = pytest.mark.long


@contextmanager
def joined(address: str, secret: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An engine of another host."""
    command = [sys.executable, "-m", "ridgeline", "serve", str(shipped_model()), "--join", address]
    environment = {**os.environ, "RIDGELINE_ENGINE_SECRET": secret}
    with log.open("wb") as out, subprocess.Popen(command, env=environment, stdout=out, stderr=out) as process:
        try:
            yield process
        finally:
            process.terminate()


def test_an_engine_of_another_host_computes_prompts(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    with served(tmp_path / "one", *FLAGS) as server:
        expected = ask(server, PROMPT * 3, temperature=1, seed=3)[0]
    address = f"127.0.0.1:{free_port()}"
    options = ("--prefill-engines", "1", "--decode-engines", "1", "--hand-over", "tcp", "--remote-engines", "prefill")
    options += ("--engine-address", address, "--engine-secret", "the secret", "--max-num-batched-tokens", "64")
    with (
        joined(address, "another secret", tmp_path / "stranger.log"),
        joined(address, "the secret", tmp_path / "other.log") as other,
        served(tmp_path, *FLAGS, *options) as server,
    ):
        assert "it has another secret" in server.log.read_text()
        assert ask(server, PROMPT * 3, temperature=1, seed=3)[0] == expected
        assert server.metric("hand_overs_total") == 1 and server.metric("hand_over_failures_total") == 0
        assert server.metric("hand_over_bytes_total") > 0
        for number, blow in enumerate((signal.SIGKILL, signal.SIGSTOP)):
            (engine,) = children(other.pid)
            with ThreadPoolExecutor(1) as pool:
                asking = pool.submit(ask, server, f"{number} {PROMPT * 3}", temperature=0)
                until(lambda: server.stats()["running"])
                os.kill(engine, blow)
                began = time.monotonic()
                assert asking.result(TIMEOUT_S)[0]
                assert time.monotonic() - began < 45  # a silent engine counts as stuck after 30 s
            if blow == signal.SIGSTOP:
                os.kill(engine, signal.SIGKILL)
            until(lambda: ready(server))
        assert ask(server, PROMPT * 3, temperature=1, seed=3)[0] == expected
        assert server.rest()["used"] == 0
