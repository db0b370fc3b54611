"""Collectives between GPUs: the sum in float64, the same bits on all ranks, eagerly and in graphs, and an end if a rank is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.gpu_rank import DTYPES, SIZES, TIMEOUT_S

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module", params=[2, 4, 8])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank wrote."""
    size: int = request.param
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    folder = tmp_path_factory.mktemp(f"ranks{size}")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engine.gpu_rank", str(rank), str(size), str(folder)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        for process in reversed(processes):  # the others wait for a rank that fails
            _, errors = process.communicate(timeout=4 * TIMEOUT_S)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(size)]


def test_sums_are_those_of_float64_and_equal_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    first = ranks[0]["sums"]
    assert {f"chosen {name} {nbytes}" for name in DTYPES for nbytes in SIZES} <= first.keys()
    for case, sums in first.items():
        assert max(error for error, _ in sums) < len(ranks), case
        assert all(rank["sums"][case] == sums for rank in ranks), case


def test_own_kernels_are_used_on_hopper(ranks: list[dict[str, Any]]) -> None:
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert all(rank["own kernels"] == hopper for rank in ranks)
    assert ("one shot bfloat16 8192" in ranks[0]["sums"]) == hopper


def test_many_sums_without_a_pause(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["burst"] == ranks[0]["burst"] for rank in ranks)


def test_sums_between_products_may_overlap_them(ranks: list[dict[str, Any]]) -> None:
    for tokens, (apart, together) in ranks[0]["overlapped"].items():
        assert apart == together, tokens
    assert all(rank["overlapped"] == ranks[0]["overlapped"] for rank in ranks)


def test_one_token_runs_through_all_layers_in_a_kernel_per_rank(ranks: list[dict[str, Any]]) -> None:
    """As on one GPU, with the same bits on all ranks and in every launch."""
    first = ranks[0]["layers"]
    assert len(first) == (9 if ranks[0]["own kernels"] else 0)
    for case, (distance, _, same) in first.items():
        assert distance < (8e-2 if case.startswith("fp8") else 1e-2) and same, case
        assert all(rank["layers"][case] == first[case] for rank in ranks), case


def test_parts_arrive_in_order(ranks: list[dict[str, Any]]) -> None:
    size = len(ranks)
    for rank, results in enumerate(ranks):
        gathered, swapped, message = results["moved"]
        assert gathered == [10.0 * sender + at for sender in range(size) for at in range(6)]
        assert swapped == [10.0 * sender + at + 100 * rank for sender in range(size) for at in range(3)]
        assert message == [10.0 * ((rank - 1) % size) + at for at in range(6)]


def test_keys_of_a_prompt_travel(ranks: list[dict[str, Any]]) -> None:
    """And each rank's attention is that of one GPU, up to the rounding of bfloat16 to numbers below 1."""
    assert max(rank["prompt"] for rank in ranks) < 2**-7


def test_an_abort_ends_what_waits_for_a_rank_that_is_gone(ranks: list[dict[str, Any]]) -> None:
    assert all(ranks[0]["waits"].values()), "the device waits for the other rank"
    assert ranks[0]["waited_s"] < 4
    assert "Rank 0" in ranks[0]["error"] and "lost the other ranks" in ranks[0]["error"]
