"""On GPUs: an engine for prompts and one for the other tokens, on one GPU or on two, answer as one engine does, also after one of
them was killed."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from .served import TIMEOUT_S, Served, served
from .test_prefill_decode import PROMPT, ask, ready, until

pytestmark = pytest.mark.gpu
COMMAND = ("serve", "--port", "0")
FLAGS = ("--dtype", "float32", "--device", "cuda", "--max-model-len", "2048", "--kv-cache-memory", "256M")
SPLIT = ("--prefill-engines", "1", "--decode-engines", "1")
KINDS = ({"temperature": 0}, {"temperature": 1, "seed": 3})


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The answers of one engine, the last to a prompt three times as long."""
    with served(tmp_path_factory.mktemp("one"), *FLAGS, command=COMMAND) as server:
        return answers(server)


def answers(server: Served) -> list[str]:
    return [*(ask(server, PROMPT, **kind)[0] for kind in KINDS), ask(server, PROMPT * 3, temperature=0)[0]]


@pytest.mark.parametrize("gpus", ["0", "0,1"])
def test_two_engines_answer_as_one(gpus: str, expected: list[str], tmp_path: Path) -> None:
    if torch.cuda.device_count() < len(gpus.split(",")):
        pytest.skip("needs two GPUs")
    variables = {"CUDA_VISIBLE_DEVICES": gpus}
    with served(tmp_path, *FLAGS, *SPLIT, command=COMMAND, variables=variables) as server:
        assert answers(server) == expected
        assert server.metric("hand_overs_total") == 3 and server.metric("hand_over_bytes_total") > 0
        assert server.metric("hand_over_failures_total") == 0, server.log.read_text()
        with ThreadPoolExecutor(4) as pool:  # prompts that no cache has, several pulls at once
            others = [pool.submit(ask, server, f"{number} {PROMPT}", temperature=0) for number in range(8)]
            first = [other.result(TIMEOUT_S)[0] for other in others]
        assert server.metric("hand_over_failures_total") == 0, server.log.read_text()
        for place in (0, 1):  # of the engines: first the one for prompts, then the other one
            with ThreadPoolExecutor(1) as pool:
                asking = pool.submit(ask, server, f"{place} again {PROMPT}", temperature=0)
                until(lambda: server.stats()["running"])
                os.kill(server.children()[0], signal.SIGKILL)  # a new process comes last
                assert asking.result(TIMEOUT_S)[0]
            until(lambda: ready(server))
        assert answers(server) == expected
        assert [ask(server, f"{number} {PROMPT}", temperature=0)[0] for number in range(8)] == first
        assert server.rest()["used"] == 0 and server.metric("engine_restarts_total") == 2
