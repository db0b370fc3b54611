"""A decoder over two processes computes what it computes in one: weights sliced, KV heads divided or repeated, sums over ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ridgeline.core.errors import ConfigError, EngineFailed
from ridgeline.parallel.connect import Meeting, connect
from ridgeline.parallel.gloo import GlooGroup
from ridgeline.parallel.gpu import LIMITS
from ridgeline.parallel.mesh import ONE_DEVICE, Mesh
from tests.models.families import FAMILIES, save
from tests.models.mesh_rank import CASES, DECODED, QUICK, TIMEOUT_S, load, logits

ROOT = Path(__file__).parents[2]
RANKS = 2


@pytest.fixture(scope="session")
def cases(request: pytest.FixtureRequest) -> list[str]:
    """Those that this run asks for, and the two that tests of all cases need."""
    asked = {item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")}
    return [case for case in CASES if case in asked or case in ("biases", "divided stream")]


@pytest.fixture(scope="session")  # a worker may run this module in several parts, and would start the ranks for each
def folder(cases: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mesh")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "llama-wide", ("Llama", {"intermediate_size": 128}))
        for family in {CASES[case][0] for case in cases}:
            save(family, folder / family)
    return folder


@pytest.fixture(scope="session")
def ranks(cases: list[str], folder: Path) -> Iterator[list[dict[str, torch.Tensor]]]:
    """What each rank wrote."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.models.mesh_rank", str(rank), str(RANKS), str(folder), *cases],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        for process in processes:
            _, said = process.communicate(timeout=4 * TIMEOUT_S)
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()
    yield [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else [pytest.mark.long]) for case in CASES]
)
def test_two_ranks_are_one_device(case: str, folder: Path, ranks: list[dict[str, torch.Tensor]]) -> None:
    """Logits of every token of every step, and so the greedy tokens, from the same checkpoint; bits are equal between ranks."""
    model = load(folder, case)
    want = logits(model)
    first, second = (rank[case] for rank in ranks)
    # Rounding is relative to the summands, not to their sum: an absolute bound alone would depend on the processor's kernels. Those
    # of integers round inputs to 2^-15 of the largest, so that a difference in an input's last bit may become as large.
    _, quantization, compiled = CASES[case]
    bound = 1e-4 if quantization and compiled else 1e-5
    torch.testing.assert_close(first, want, rtol=bound, atol=bound * max(1.0, float(want.abs().max())))
    assert torch.equal(first, second)
    drawn = slice(-2 * DECODED, None)
    assert torch.equal(first[drawn].argmax(-1), want[drawn].argmax(-1))


def test_a_divided_stream_moves_as_many_bytes(ranks: list[dict[str, torch.Tensor]]) -> None:
    """A reduce-scatter and an all-gather move what an all-reduce moves, but for padding, and for the stream behind the layers."""
    divided, whole = (ranks[0][f"{case}: sent"] for case in ("divided stream", "biases"))
    layers, width, steps, one_token = 3, 64 * 4, (18, 33), 2 * DECODED  # tests.models.mesh_rank.logits
    # Every rank also sends its part of the embedding's sum, and of the logits of a vocabulary of 320.
    ends = (sum(steps) + one_token) * (width + 320 // RANKS * 4)
    assert whole == layers * 2 * (sum(steps) + one_token) * width + ends
    shares = [-(-tokens // RANKS) for tokens in steps]
    assert divided == (layers * 2 * (2 * sum(shares) + one_token) + sum(shares)) * width + ends


def test_a_rank_that_ends_is_noticed(ranks: list[dict[str, object]]) -> None:
    """By the broken connection, long before the timeout."""
    assert "Rank 0 of 2 lost the other ranks" in str(ranks[0]["error"])
    waited = ranks[0]["waited_s"]
    assert isinstance(waited, float) and waited < TIMEOUT_S / 2


def test_a_rank_that_never_comes_is_waited_for_no_longer_than_told(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(EngineFailed, match="Rank 0 of 2 could not reach the other ranks"):
        connect(0, 2, Meeting(store, 0.5))


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has NCCL")
def test_gpus_need_nccl(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(ConfigError, match="Several GPUs need NCCL, which this torch does not have"):
        connect(0, 2, Meeting(store, 0.5, device=torch.device("cuda", 0)))


def test_a_muted_rank_runs_alone() -> None:
    """The group has another rank that never calls anything."""
    store = torch.distributed.HashStore()
    with ThreadPoolExecutor(2) as pool:
        first, _ = pool.map(lambda rank: GlooGroup(rank, 2, store, TIMEOUT_S), range(2))
    mesh, message = Mesh(0, 2, first), torch.ones(2)
    with mesh.muted():
        assert mesh.all_reduce(torch.arange(3.0)).tolist() == [0, 1, 2]
        assert mesh.all_gather(torch.arange(2.0)).tolist() == [[0, 1], [0, 1]]
        assert mesh.exchange(torch.arange(2.0)[:, None]).tolist() == [[0], [1]]
        first.send(message, 1, 1)
        first.receive(message, 1, 1)
    assert message.tolist() == [0, 0]
    with ONE_DEVICE.muted():
        assert ONE_DEVICE.groups == []


def test_sums_fit_into_the_memory_of_their_kernel() -> None:
    peers = pytest.importorskip("ridgeline.ops.triton.peers")
    for size, limits in LIMITS.items():
        layout = peers.Layout(size)
        assert size <= peers.MOST_RANKS and limits.one_shot <= peers.ONE_SHOT_ROOM
        assert limits.two_shot <= size * layout.part <= peers.TWO_SHOT_ROOM
        assert all(at % 16 == 0 for at in (layout.slot, layout.part, layout.parts, layout.sums, layout.flags))
    assert f"MOST = {peers.MOST_RANKS};" in peers.source(torch.bfloat16)
