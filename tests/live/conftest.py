"""One small server for all tests here: eight rows, sixteen places in the queue, and a cache of 672 tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from .honest import REQUESTS, Honest, answer
from .served import Served, served

# Before anything imports them (HF_HUB_OFFLINE is set for all tests).
os.environ["HF_DATASETS_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"

FLAGS = (
    *("--dtype", "float32"),  # in which tokens are the same alone and in any batch
    *("--max-num-seqs", "8", "--max-queue", "16", "--max-model-len", "512"),
    *("--kv-cache-memory", "5M", "--max-body-mb", "4", "--drain-s", "5"),
)

MEMORY_MB = {"front": 400.0, "engine": 1000.0}
"""What the processes may take after any test."""


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("live")
    with served(folder, *FLAGS, "--batch-dir", str(folder / "state")) as running:
        yield running


@pytest.fixture(scope="session")
def alone(server: Served) -> dict[str, Any]:
    """The honest requests' answers from an idle server, one after the other."""
    return {name: answer(server, name) for name in REQUESTS}


@pytest.fixture(scope="session")
def honest(server: Served, alone: dict[str, Any]) -> Honest:
    return Honest(server, alone)


@pytest.fixture
def unharmed(server: Served, honest: Honest) -> Iterator[None]:
    """Beside the test honest requests are answered as ever, and after it nothing is held."""
    with honest.beside():
        yield
    check_unharmed(server)


def check_unharmed(server: Served) -> None:
    """Nothing is held, memory is bounded, and the server answers."""
    stats = server.rest()
    assert (stats["running"], stats["waiting"], stats["used"]) == (0, 0, 0)
    for name, most in MEMORY_MB.items():
        assert server.memory[name] < most, (name, server.memory)
    assert server.send("GET", "/health").status == 200
    assert server.complete(max_tokens=1).status == 200
