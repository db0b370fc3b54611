"""Decode attention that selects pages against full attention: time on a CPU.

    python benchmarks/selective.py --out benchmarks/results/kv.json

Shape of one layer of an 8B model (32 query heads, 8 KV heads of 128), one row, random keys on the CPU. Random keys say what
choosing and reading cost, not what is found.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from common import cpu_name, provenance, write_rows

from ridgeline.ops.choose import choose
from ridgeline.ops.selective import choose_pages, selecting
from ridgeline.ops.step import KvView, Selection, StepInputs

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16


def case(length: int, budget: int) -> tuple[torch.Tensor, KvView, StepInputs]:
    """A decode step of one row over random keys and values in bfloat16, pages in shuffled order."""
    torch.manual_seed(0)
    pages = length // PAGE
    kv = torch.randn(pages + 1, 2, KV_HEADS, PAGE, DIM, dtype=torch.bfloat16)
    bounds = torch.stack((kv[:, 0].amin(2), kv[:, 0].amax(2)), 1)
    table = (torch.randperm(pages) + 1).int().unsqueeze(0)
    view = KvView(
        kv, table, torch.zeros(1, dtype=torch.int64), None, None, DIM**-0.5, None, None, Selection(budget, bounds)
    )
    return torch.randn(1, HEADS, DIM, dtype=torch.bfloat16), view, step_of(length)


def step_of(length: int) -> StepInputs:
    zero, size = torch.zeros(1, dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    return StepInputs(zero, torch.tensor([0, 1], dtype=torch.int32), size, size - 1, zero, 1, length)


def seconds(work: Callable[[], Any], repeats: int) -> float:
    """Median time of a call."""
    work()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return median(times)


def measure(length: int, budget: int, repeats: int) -> dict[str, Any]:
    """One row of results: full attention against selection, a new step for each call as each layer has new queries."""
    ops = choose(torch.device("cpu"), torch.bfloat16)
    q, view, _ = case(length, budget)
    plain = replace(view, selection=None)
    assert view.selection is not None
    selection, chosen = view.selection, selecting(ops)
    with torch.inference_mode():
        full = seconds(lambda: ops.attention.attend(q, None, None, plain, step_of(length)), repeats)
        part = seconds(lambda: chosen.attention.attend(q, None, None, view, step_of(length)), repeats)
        choice = seconds(lambda: choose_pages(q, view, selection, step_of(length)), repeats)
    return {
        "row": f"selective-{length // 1024}k-attention-cpu-b1",
        "value": round(full / part, 2),
        "unit": "times full attention",
        "budget": budget,
        "full_us": round(full * 1e6),
        "selective_us": round(part * 1e6),
        "of_it_choosing_us": round(choice * 1e6),
        "operations": ops.name,
        "threads": torch.get_num_threads(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="32768,131072")
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", default="")
    parser.add_argument("--commit", default="")
    options = parser.parse_args(arguments)
    rows = []
    for length in map(int, options.lengths.split(",")):
        row = measure(length, options.budget, options.repeats)
        print(row)
        rows.append({**row, **provenance(cpu_name(), options.commit)})
    if options.out:
        write_rows(options.out, rows)


if __name__ == "__main__":
    main()
