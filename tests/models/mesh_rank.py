"""One rank of a mesh, run as `python -m tests.models.mesh_rank RANK SIZE FOLDER CASE ...`: see test_mesh."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import EngineFailed
from ridgeline.models.build import LoadedModel, build
from ridgeline.ops.choose import choose
from ridgeline.ops.reference import REFERENCE
from ridgeline.parallel.connect import Meeting, connect
from ridgeline.parallel.group import Group
from ridgeline.parallel.mesh import ONE_DEVICE, Mesh
from tests.models.paged import PagedRows

CPU = torch.device("cpu")
TIMEOUT_S = 30.0
CASES = {
    "one KV head on both ranks": ("llama-mqa-tied", "", False),
    "biases": ("llama-mha-bias", "", True),
    "windows and post norms": ("gemma2", "", True),
    "shared caches": ("windows-shared", "", True),
    "int4 in groups": ("llama-wide", "int4-g32", False),
    "learned positions, int8": ("gpt2", "int8", True),
    "a norm of all heads, experts": ("olmoe", "", False),
    "sinks, experts with biases": ("gpt-oss", "", True),
    "divided stream": ("llama-mha-bias", "", True),
    "divided stream, experts": ("mixtral", "", False),
    "divided stream, parallel blocks": ("cohere2", "", True),
    "grouped heads": ("llama-gqa", "", False),
    "int8": ("llama-gqa", "int8", False),
    "parallel blocks, layer norms": ("cohere2", "", False),
    "pairs moved apart": ("glm4", "", True),
    "a norm of all heads": ("olmo2", "", True),
    "divided stream, windows and post norms": ("gemma2", "", True),
    "divided stream, a norm of all heads": ("olmo2", "", False),
    "divided stream, multipliers": ("granite", "", False),
    "divided stream, int8": ("llama-gqa", "int8", False),
}
"""Family, quantization, and whether the CPU's kernels run it or the reference."""
QUICK = tuple(CASES)[:11]
"""What `make test` runs."""
PROMPTS = ([5, 9, 2, 77, 41, 200, 13, 8, 300, 11, 6], list(range(20, 60)))
DECODED = 6


def load(folder: Path, case: str, mesh: Mesh = ONE_DEVICE) -> LoadedModel:
    family, quantization, compiled = CASES[case]
    ops = choose(CPU, torch.float32) if compiled else REFERENCE
    model = ModelConfig(quantization=quantization)
    mesh = replace(mesh, sequence="divided stream" in case)
    return build(folder / family, model=model, ops=ops, device=CPU, mesh=mesh)


class CountedGroup(Group):
    """Bytes that each rank sends, by the volumes of ring algorithms."""

    def __init__(self, group: Group, size: int) -> None:
        self._group, self._size, self.sent = group, size, 0

    def all_reduce(self, x: torch.Tensor) -> None:
        self.sent += int(2 * (self._size - 1) / self._size * x.nbytes)
        self._group.all_reduce(x)

    def all_gather(self, parts: torch.Tensor, x: torch.Tensor) -> None:
        self.sent += x.nbytes * (self._size - 1)
        self._group.all_gather(parts, x)

    def exchange(self, received: torch.Tensor, x: torch.Tensor) -> None:
        self.sent += int((self._size - 1) / self._size * x.nbytes)
        self._group.exchange(received, x)


def logits(model: LoadedModel) -> torch.Tensor:
    """float32 [tokens, vocab] of all steps: prompts in chunks of different sizes, then greedy decoding of both rows."""
    rows = PagedRows(model)
    first, second = PROMPTS
    steps = [[(0, first), (1, second[:7])], [(1, second[7:])]]
    results = [rows.step(work) for work in steps]
    last = [results[0][len(first) - 1], results[1][-1]]
    for _ in range(DECODED):
        results.append(rows.step([(row, [int(logits_row.argmax())]) for row, logits_row in enumerate(last)]))
        last = list(results[-1])
    return torch.cat(results)


def main(rank: int, size: int, folder: Path, cases: list[str]) -> None:
    """Write what this rank computes in cases of CASES, then end as rank 1 while rank 0 waits, and write what rank 0 is told."""
    store = torch.distributed.FileStore(str(folder / "store"), size)
    mesh = connect(rank, size, Meeting(store, TIMEOUT_S))
    assert mesh.group is not None
    group = CountedGroup(mesh.group, size)
    mesh = replace(mesh, group=group)
    by_case: dict[str, object] = {}
    for case in cases:
        group.sent = 0
        by_case[case] = logits(load(folder, case, mesh))
        by_case[f"{case}: sent"] = group.sent
    assert not torch.distributed.is_initialized()
    if rank == 0:
        begin = time.monotonic()
        try:
            mesh.all_reduce(torch.ones(4))
        except EngineFailed as error:
            by_case["error"], by_case["waited_s"] = str(error), time.monotonic() - begin
    torch.save(by_case, folder / f"rank{rank}.pt")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
