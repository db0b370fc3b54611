"""On GPUs: an engine for prompts and one for the other tokens answer as one engine does, on one GPU, on two, through host memory,
and after one of them was killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
WITHOUT_HANDLES = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The answers of one engine."""
    with served(tmp_path_factory.mktemp("one"), *FLAGS, command=COMMAND) as server:
        return answers(server)


def answers(server: Served) -> list[str]:
    """To a prompt in two ways, to a longer one, and to eight at once."""
    alone = [ask(server, PROMPT, **kind)[0] for kind in KINDS]
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, server, f"{number} {PROMPT}", temperature=0) for number in range(8)]
        return [*alone, ask(server, PROMPT * 3, temperature=0)[0], *(answer.result(TIMEOUT_S)[0] for answer in asked)]


@contextmanager
def two_engines(folder: Path, gpus: str, *flags: str, **variables: str) -> Iterator[Served]:
    if torch.cuda.device_count() < len(gpus.split(",")):
        pytest.skip("needs two GPUs")
    variables = {"CUDA_VISIBLE_DEVICES": gpus, **variables}
    with served(folder, *FLAGS, *SPLIT, *flags, command=COMMAND, variables=variables) as server:
        yield server


@pytest.mark.parametrize(
    ("gpus", "variables"),
    [("0", {}), ("0,1", {}), ("0", WITHOUT_HANDLES)],
    ids=["one GPU", "two GPUs", "through host memory"],
)
def test_two_engines_answer_as_one(gpus: str, variables: dict[str, str], expected: list[str], tmp_path: Path) -> None:
    with two_engines(tmp_path, gpus, **variables) as server:
        assert answers(server) == expected
        log = server.log.read_text()
        assert ("through host memory" in log) == bool(variables) and "cannot be opened" not in log
        assert server.metric("hand_overs_total") == len(expected) and server.metric("hand_over_bytes_total") > 0
        assert server.metric("hand_over_failures_total") == 0, log
        assert server.rest()["used"] == 0


@pytest.mark.parametrize("gpus", ["0", "0,1"])
def test_two_engines_answer_as_one_over_tcp(gpus: str, expected: list[str], tmp_path: Path) -> None:
    """Chunk by chunk, through pinned host memory on both sides."""
    with two_engines(tmp_path, gpus, "--hand-over", "tcp", "--max-num-batched-tokens", "64") as server:
        assert answers(server) == expected
        assert server.metric("hand_overs_total") == len(expected) and server.metric("hand_over_bytes_total") > 0
        assert server.metric("hand_over_failures_total") == 0, server.log.read_text()
        assert server.rest()["used"] == 0


def test_engines_that_are_killed(expected: list[str], tmp_path: Path) -> None:
    gpus = "0,1" if torch.cuda.device_count() > 1 else "0"
    with two_engines(tmp_path, gpus, "--enforce-eager") as server:
        for place in (0, 1):  # of the engines: first the one for prompts, then the other one
            with ThreadPoolExecutor(1) as pool:
                asking = pool.submit(answers, server)
                until(lambda: server.stats()["running"])
                os.kill(server.children()[0], signal.SIGKILL)  # a new process comes last
                assert asking.result(TIMEOUT_S) == expected, place
            until(lambda: ready(server))
        before = server.metric("hand_over_failures_total")
        assert ask(server, f"at last {PROMPT}")[0], "new engines hand over"
        assert server.metric("hand_over_failures_total") == before
        assert server.rest()["used"] == 0 and server.metric("engine_restarts_total") == 2
