"""A server with an engine for prompts and one for the other tokens: killed engines, and a killed server."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from .served import TIMEOUT_S, Served, served

FLAGS = ("--dtype", "float32", "--device", "cpu", "--max-model-len", "1024", "--kv-cache-memory", "32M")
PROMPT = "Once upon a time there was a girl who lived in a village near the forest. " * 4
pytestmark = pytest.mark.long


def held_pools(pids: list[int]) -> set[int]:
    """Processes among these that hold a pool."""
    holders = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                if "ridgeline-pool" in os.readlink(link):
                    holders.add(pid)
    return holders


def until(condition: Any) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ready(server: Served) -> bool:
    return len(server.stats()["engines"]) == 2


def ask(server: Served, prompt: str, **options: Any) -> tuple[str, dict[str, Any]]:
    reply = server.complete(prompt, max_tokens=60, **options)
    assert reply.status == 200, reply.data
    return reply.json["choices"][0]["text"], reply.json["usage"]


def test_engines_that_are_killed(tmp_path: Path) -> None:
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1, "seed": 3}]
    (tmp_path / "one").mkdir()
    with served(tmp_path / "one", *FLAGS) as server:
        expected = [ask(server, PROMPT, **kind)[0] for kind in kinds]
        long = ask(server, PROMPT * 3, temperature=0)[0]
    with served(tmp_path, *FLAGS, "--prefill-engines", "1", "--decode-engines", "1") as server:
        assert [ask(server, PROMPT, **kind)[0] for kind in kinds] == expected
        assert ask(server, PROMPT, **kinds[0])[1]["prompt_tokens_details"]["cached_tokens"] > 0
        assert server.metric("hand_overs_total") == 3 and server.metric("hand_over_bytes_total") > 0
        assert server.metric("hand_over_failures_total") == 0
        pids = server.processes()
        for place in (0, 1):  # of the engines: first the one for prompts, then the other one
            with ThreadPoolExecutor(1) as pool:
                asking = pool.submit(ask, server, PROMPT * 3, temperature=0)
                until(lambda: server.stats()["running"])
                os.kill(server.children()[0], signal.SIGKILL)  # a new process comes last
                assert asking.result(TIMEOUT_S)[0] == long, place
            until(lambda: ready(server))
        assert [ask(server, PROMPT, **kind)[0] for kind in kinds] == expected
        assert server.rest()["used"] == 0 and server.metric("engine_restarts_total") == 2
        pids += server.processes()
        assert len(held_pools(pids)) == 3
        server.process.send_signal(signal.SIGKILL)
        until(lambda: not held_pools(pids))


def test_options_that_do_not_hold_end_the_start(tmp_path: Path) -> None:
    for number, (options, words) in enumerate(
        {
            ("--decode-engines", "1", "--kv-offload-gb", "0.1"): "engines that hand prompts over have no tiers",
            ("--decode-engines", "1", "-tp", "2"): "several ranks hand nothing over",
            (): "without --decode-engines",
        }.items()
    ):
        (folder := tmp_path / str(number)).mkdir()
        with pytest.raises(AssertionError, match=words), served(folder, *FLAGS, "--prefill-engines", "1", *options):
            pass
