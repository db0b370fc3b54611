"""A GPU's rank of collectives, run as `python -m tests.engine.gpu_rank RANK SIZE FOLDER`: see test_gpu_groups.

It writes the numbers that test_gpu_groups compares. At last rank 0 waits on the device for ranks that do not come.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from ridgeline.core.errors import EngineFailed
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.striped import split_tokens, striped
from ridgeline.ops.table import Normed
from ridgeline.ops.triton.linears import linear, linear_add
from ridgeline.ops.triton.table import TRITON
from ridgeline.parallel.connect import Meeting, connect
from ridgeline.parallel.gpu import GpuGroup
from ridgeline.parallel.mesh import Mesh
from tests.engine.gpu_layers import layers, waiting

TIMEOUT_S = 60.0
SIZES = (8, 64, 4096, 8192, 8192 + 32, 65_536, 524_288, 4 << 20, 64 << 20)
"""Bytes of sums."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
REPLAYS = 5


def numbers(rank: int, turn: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank adds in a turn."""
    chance = torch.Generator().manual_seed(1000 * turn + rank)
    return torch.randn(count, generator=chance).to(dtype)


def error(x: torch.Tensor, size: int, turn: int) -> float:
    """The largest difference to the sum in float64, in units of the last place of numbers of size 4."""
    parts = [numbers(rank, turn, len(x), x.dtype).double() for rank in range(size)]
    differences = (x.cpu().double() - sum(parts)).abs()
    return float(differences.max()) / (4 * torch.finfo(x.dtype).eps) if len(x) else 0.0


def ways(group: GpuGroup) -> dict[str, Callable[[torch.Tensor], object]]:
    """How a sum can be made, the last one as the model does it."""
    made: dict[str, Callable[[torch.Tensor], object]] = {"nccl": group.nccl.all_reduce}
    if group.sums is not None:
        made |= {"one shot": group.sums.one_shot, "two shots": group.sums.two_shot}
    return made | {"chosen": group.all_reduce}


def run(group: GpuGroup, rank: int, size: int) -> dict[str, Any]:
    """Per way, dtype and size: [error, CRC] of eager sums, and of those of a graph that is replayed over new numbers."""
    results: dict[str, Any] = {}
    for way, add in ways(group).items():
        for name, dtype in DTYPES.items():
            for nbytes in SIZES:
                count = nbytes // torch.finfo(dtype).bits * 8
                x = numbers(rank, 0, count, dtype).cuda()
                if add(x) is False:
                    continue
                sums = [(error(x, size, 0), crc32(x.view(torch.uint8).cpu().numpy().tobytes()))]
                static = numbers(rank, 0, count, dtype).cuda()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    add(static)
                for turn in range(1, 1 + (REPLAYS if nbytes < 1 << 22 else 1)):
                    static.copy_(numbers(rank, turn, count, dtype))
                    graph.replay()
                    sums.append((error(static, size, turn), crc32(static.view(torch.uint8).cpu().numpy().tobytes())))
                results[f"{way} {name} {nbytes}"] = sums
    return results


def burst(group: GpuGroup, rank: int, size: int) -> list[int]:
    """CRCs of many sums without a pause, of changing sizes: a message must not overwrite one that a slower rank still reads."""
    total = []
    for way in ways(group).values():
        xs = [numbers(rank, turn, 32 * (1 + 37 * turn % 800), torch.bfloat16).cuda() for turn in range(200)]
        for x in xs:
            if rank and len(x) % 3 == 0:
                torch.cuda._sleep(20_000)
            if way(x) is False:
                group.nccl.all_reduce(x)
        torch.cuda.synchronize()
        assert max(error(x, size, turn) for turn, x in enumerate(xs)) < size
        total.append(crc32(torch.cat(xs).view(torch.uint8).cpu().numpy().tobytes()))
    return total


def overlapped(group: GpuGroup, rank: int) -> dict[str, tuple[int, int]]:
    """By number of tokens, CRCs of products, norms and sums one at a time, and from a graph in which each starts while the kernel
    before it ends. The ranks are late by turns."""
    width, blocks, results = 2048, 24, {}
    weights = [
        [
            (numbers(rank, 2 * at + which, width * width, torch.bfloat16) / 64).view(width, width).cuda()
            for which in (0, 1)
        ]
        for at in range(blocks)
    ]
    gain = torch.ones(width, dtype=torch.bfloat16, device="cuda")
    for tokens in (1, 64):
        static = numbers(0, tokens, tokens * width, torch.bfloat16).view(tokens, width).cuda()

        def chain(each: Callable[[], object], start: torch.Tensor = static) -> torch.Tensor:
            stream = start.clone()
            for at, (first, second) in enumerate(weights):
                if at % 2 == rank % 2:
                    torch.cuda._sleep(5_000)
                hidden = linear(Normed(stream, gain, 1e-5, False), first, None)
                each()
                stream = linear(hidden, second, None) if rank else linear_add(hidden, second, None, stream)
                each()
                group.all_reduce(stream)
                each()
            return stream

        apart = chain(torch.cuda.synchronize)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            together = chain(lambda: None)
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
        both = (crc32(x.view(torch.uint8).cpu().numpy().tobytes()) for x in (apart, together))
        results[f"{tokens} tokens"] = (next(both), next(both))
    return results


def moved(group: GpuGroup, rank: int, size: int) -> list[list[float]]:
    """What all_gather, exchange and a message around the ring bring."""
    x = torch.arange(6.0).cuda() + 10 * rank
    parts, swapped, message = x.new_empty(size, 6), x.new_empty(size, 3), x.new_empty(6)
    group.all_gather(parts, x)
    group.exchange(swapped, torch.stack([x[:3] + 100 * to for to in range(size)]))
    if rank == 0:
        group.send(x, 1, 1)
        group.receive(message, size - 1, 1)
    else:
        group.receive(message, rank - 1, 1)
        group.send(x, (rank + 1) % size, 1)
    return [parts.flatten().tolist(), swapped.flatten().tolist(), message.tolist()]


def prompt(mesh: Mesh) -> float:
    """The largest difference of a chunk's attention over context-parallel ranks, whose keys travel, to that of one GPU. Heads and
    chunk are such that the kernel for long chunks runs on both."""
    rank, size, slots, tokens, page = mesh.rank, mesh.size, 1500, 1024, 64
    chance, pages = torch.Generator().manual_seed(5), -(-slots // (page * size))
    kv = torch.randn(pages + 1, 2, 2, page * size, 128, generator=chance).to(torch.bfloat16).cuda()
    q = torch.randn(tokens, 8, 128, generator=chance).to(torch.bfloat16).cuda()
    table = torch.stack((torch.zeros(pages), torch.randperm(pages, generator=chance) + 1)).int().cuda()
    position = torch.arange(slots - tokens, slots, dtype=torch.int32).cuda()
    row, q_start, length = (torch.tensor(entries, dtype=torch.int32).cuda() for entries in ([1], [0, tokens], [slots]))
    written = table[1, (position // (page * size)).long()].long() * page * size + position % (page * size)
    view = KvView(kv, table, written, None, None, 128**-0.5)
    step = StepInputs(row, q_start, length, position, torch.zeros_like(position), tokens, slots)
    want, _ = TRITON.attention.attend(q, None, None, view, step)
    part = replace(view, kv=kv[:, :, :, rank * page : (rank + 1) * page].contiguous())
    ops = striped(TRITON, mesh)

    def run(stream: torch.Tensor, views: Sequence[KvView], chosen: StepInputs) -> torch.Tensor:
        return ops.attention.attend(stream.unflatten(1, (8, 128)), None, None, part, chosen)[0].flatten(1)

    merged = split_tokens(run, mesh)(q.flatten(1), [], replace(step))
    return float((merged.float() - want.flatten(1).float()).abs().max())


def main(rank: int, size: int, folder: Path) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = torch.distributed.FileStore(str(folder / "store"), size)
    mesh = connect(rank, size, Meeting(store, TIMEOUT_S, device=device))
    group = mesh.group
    assert isinstance(group, GpuGroup)
    results: dict[str, Any] = {"own kernels": group.sums is not None, "sums": run(group, rank, size)}
    results |= {
        "burst": burst(group, rank, size),
        "moved": moved(group, rank, size),
        "prompt": prompt(mesh),
        "overlapped": overlapped(group, rank),
        "layers": layers(group, rank, size) if group.peers is not None else {},
    }
    torch.cuda.synchronize()
    if rank == 0:
        waits: dict[str, bool] = {}
        launch = None if group.peers is None else waiting(group, size)
        for way, add in ways(group).items():
            add(torch.ones(4096, device=device))
            waits[way] = not torch.cuda.current_stream().query()
        if launch is not None:
            launch()
        begin = time.monotonic()
        threading.Timer(1.0, mesh.abort).start()
        torch.cuda.synchronize()
        results |= {"waits": waits, "waited_s": time.monotonic() - begin}
        try:
            mesh.all_gather(torch.ones(4, device=device))
        except EngineFailed as failure:
            results["error"] = str(failure)
    torch.save(results, folder / f"rank{rank}.part")
    (folder / f"rank{rank}.part").rename(folder / f"rank{rank}.pt")
    while not (folder / "rank0.pt").exists():  # rank 0 writes into the memory of the others
        time.sleep(0.1)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
