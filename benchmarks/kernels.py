"""Times the attention kernels on one GPU against its limits, for both orders of the cache's memory.

    python benchmarks/kernels.py --out benchmarks/results/kernels.json [--sweep] [--only decode|prefill]

Decode rows are replays of a CUDA graph that calls attention once per layer, so that no layer finds its keys in the
cache of the chip. --sweep tries other launch configurations than the shipped ones and prints them; it changes nothing.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from common import provenance, write_rows

from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.triton import attention, tuning
from ridgeline.ops.triton.table import TRITON
from ridgeline.ops.triton.tuning import Tile

HEADS, KV_HEADS, DIM, LAYERS, PAGE = 32, 8, 128, 32, 64
READ_TB_S = 4.26
"""What a plain read reached on the H200 that the figures quote."""
GEMM_TFLOP_S = 788.0
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Row:
    """One result. value in `unit`; share: of the read bandwidth or of the matrix rate above."""

    row: str
    order: str
    value: float
    unit: str
    share: float
    microseconds: float
    tile: str


@dataclass(frozen=True)
class Batch:
    """A step and the 32 layers' views it reads."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    views: list[KvView]
    step: StepInputs

    def layer(self, index: int) -> torch.Tensor:
        return TRITON.attention.attend(self.q, self.k, self.v, self.views[index % len(self.views)], self.step)[0]


def make(rows: list[tuple[int, int]], order: str, layers: int = LAYERS) -> Batch:
    """A batch of `rows` (slots held, query tokens), its pages in random order over a cache with `layers` layers."""
    longest = max(length for length, _ in rows)
    per_row = -(-longest // PAGE)
    pages = len(rows) * per_row + 1
    size = (2, KV_HEADS, PAGE, DIM)
    shape = (pages, layers, *size) if order == "page" else (layers, pages, *size)
    pool = torch.empty(shape, dtype=DTYPE, device="cuda").normal_()
    table = torch.zeros(len(rows) + 1, per_row, dtype=torch.int32, device="cuda")
    table[1:] = (torch.randperm(pages - 1, device="cuda") + 1).int().view(len(rows), per_row)
    lengths = torch.tensor([length for length, _ in rows], dtype=torch.int32, device="cuda")
    counts = torch.tensor([n for _, n in rows], device="cuda")
    starts = torch.cat((torch.zeros(1, dtype=torch.int64, device="cuda"), counts.cumsum(0)))
    row_of = torch.repeat_interleave(torch.arange(len(rows), device="cuda"), counts)
    total = int(starts[-1])
    position = lengths[row_of].long() - counts[row_of] + torch.arange(total, device="cuda") - starts[row_of]
    slots = table[row_of + 1, position // PAGE].long() * PAGE + position % PAGE
    step = StepInputs(
        rows=torch.arange(1, len(rows) + 1, dtype=torch.int32, device="cuda"),
        q_start=starts.int(),
        length=lengths,
        position=position.int(),
        row_of=row_of.int(),
        max_query=max(n for _, n in rows),
        max_length=longest,
    )
    views = [
        KvView(pool[:, layer] if order == "page" else pool[layer], table, slots, None, None, DIM**-0.5)
        for layer in range(layers)
    ]
    q = torch.randn(total, HEADS, DIM, dtype=DTYPE, device="cuda")
    k, v = (torch.randn(total, KV_HEADS, DIM, dtype=DTYPE, device="cuda") for _ in range(2))
    return Batch(q, k, v, views, step)


def check() -> None:
    """Stop before timing anything that is wrong."""
    for rows in ([(700, 1), (3, 1), (5000, 1)], [(900, 300), (70, 1), (130, 130)], [(3000, 2900), (1, 1), (4100, 513)]):
        batch = make(rows, "page", layers=2)
        out = batch.layer(1)
        want, _ = REFERENCE.attention.attend(batch.q.double(), batch.k, batch.v, batch.views[1], batch.step)
        error = float((out.double() - want).norm() / want.norm())
        if not error < 1e-2:
            raise SystemExit(f"attention is wrong on {rows}: relative error {error:.3g}")


def microseconds(run: Callable[[], object], repeats: int) -> float:
    """Median time of `run` by device events."""
    times = []
    for _ in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[2:])


Timed = Callable[[], tuple[float, float]]
"""Times one layer under the configuration now set: (microseconds, bytes of keys and values read, or FLOPs)."""


def time_decode(rows: int, context: int, order: str) -> Timed:
    """Rows of one query token each: bytes."""
    batch = make([(context, 1)] * rows, order)

    def timed() -> tuple[float, float]:
        fresh = replace(batch, step=replace(batch.step))
        fresh.layer(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in range(LAYERS):
                fresh.layer(layer)
        return microseconds(graph.replay, 10) / LAYERS, rows * context * 2.0 * KV_HEADS * DIM * DTYPE.itemsize

    return timed


def time_prefill(rows: list[tuple[int, int]], order: str) -> Timed:
    """Rows of (slots held, query tokens): FLOPs."""
    batch = make(rows, order)
    pairs = sum(chunk * (length - chunk) + chunk * (chunk + 1) / 2 for length, chunk in rows)

    def timed() -> tuple[float, float]:
        fresh = replace(batch, step=replace(batch.step))
        fresh.layer(0)

        def layers() -> None:
            for layer in range(8):
                fresh.layer(layer)

        return microseconds(layers, 5) / 8, 4.0 * pairs * HEADS * DIM

    return timed


PREFILL = ((1, 2048, 2048), (1, 4096, 4096), (1, 8192, 8192), (1, 8192, 2048), (7, 1100, 1100))
"""(rows, slots held, query tokens) of the chunks that are timed."""
SPLIT_SWEEP = [
    (Tile(16, 64, 4, 7), 2),
    (Tile(16, 64, 4, 3), 4),
    (Tile(16, 64, 8, 5), 3),
    (Tile(16, 64, 2, 5), 3),
    (Tile(16, 32, 4, 8), 4),
    (Tile(16, 32, 4, 5), 5),
    (Tile(16, 128, 4, 3), 3),
    (Tile(16, 128, 8, 5), 1),
]
CHUNK_SWEEP = [
    # Of the kernel for any GPU, which a sweep asks instead of Hopper's.
    Tile(128, 64, 8, 5),
    Tile(128, 128, 8, 3),
    Tile(128, 32, 8, 5),
    Tile(128, 64, 4, 3),
    Tile(64, 64, 4, 3),
    Tile(64, 128, 4, 3),
    Tile(256, 64, 8, 3),
]


def _named(tile: Tile) -> str:
    return f"{tile.queries}x{tile.keys} w{tile.warps} s{tile.stages}"


def variants(decode: bool, sweep: bool) -> Iterator[str]:
    """Set each configuration in turn and name it; the shipped one first, and again in the end."""
    shipped = (tuning.SPLIT_TILES[DIM], tuning.CHUNK_TILES[DIM], tuning.SPLIT_PROGRAMS_PER_PROCESSOR)
    yield f"{_named(shipped[0])} (shipped)" if decode else "shipped"
    if not sweep:
        return
    split, chunk = attention.SPLIT, attention.CHUNK
    try:
        if decode:
            for tile, programs in SPLIT_SWEEP:
                tuning.SPLIT_TILES[DIM], tuning.SPLIT_PROGRAMS_PER_PROCESSOR = tile, programs
                attention.SPLIT = split.without()
                yield f"{_named(tile)} p{programs}"
        else:
            for tile in CHUNK_SWEEP:
                tuning.CHUNK_TILES[DIM] = tile
                attention.CHUNK = chunk.without("hopper")
                yield _named(tile)
    finally:
        attention.SPLIT, attention.CHUNK = split, chunk
        tuning.SPLIT_TILES[DIM], tuning.CHUNK_TILES[DIM], tuning.SPLIT_PROGRAMS_PER_PROCESSOR = shipped


def measure(name: str, order: str, timed: Timed, decode: bool, sweep: bool) -> Iterator[Row]:
    """Time one workload under every configuration asked for."""
    for tile in variants(decode, sweep):
        try:
            spent, work = timed()
        except Exception as error:  # a configuration beyond the chip's memory; the shipped one must run
            if "shipped" in tile:
                raise
            print(f"{name:24} {order:6} {tile:26} {type(error).__name__}")
            continue
        rate = work / spent * 1e-6
        share = rate / (READ_TB_S if decode else GEMM_TFLOP_S)
        unit = "TB/s" if decode else "TFLOP/s"
        print(f"{name:24} {order:6} {tile:26} {spent:9.1f} us {rate:8.2f} {unit:8} {share:6.1%}", flush=True)
        yield Row(name, order, round(rate, 4), unit, round(share, 4), round(spent, 2), tile)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="file for the results, JSON")
    parser.add_argument("--only", choices=("decode", "prefill"))
    parser.add_argument("--sweep", action="store_true", help="try other launch configurations too, in page order")
    options = parser.parse_args()
    check()
    rows: list[Row] = []
    for order in ("page", "layer"):
        sweep = options.sweep and order == "page"
        if options.only != "prefill":
            for batch, context in ((64, 4096), (1, 32768), (16, 1024), (256, 1024)):
                rows += measure(f"decode-b{batch}-ctx{context}", order, time_decode(batch, context, order), True, sweep)
                torch.cuda.empty_cache()
        if options.only != "decode":
            for count, length, chunk in PREFILL:
                name = f"prefill-{f'{count}x' * (count > 1)}{chunk}-of-{length}"
                rows += measure(name, order, time_prefill([(length, chunk)] * count, order), False, sweep)
                torch.cuda.empty_cache()
    where = provenance(torch.cuda.get_device_name())
    write_rows(options.out, [asdict(row) | where for row in rows])


if __name__ == "__main__":
    main()
