"""What attention sinks (gpt-oss) add to attention: the same call with and without them, on this machine's device.

    python benchmarks/sinks.py --out benchmarks/results/sinks.json

Shapes of gpt-oss: 64 query heads, 8 KV heads of 64 elements, bfloat16, windows of 128 tokens and none. `with` needs the log-sum-exp
of attention and multiplies its output. Calls alternate; the shortest of each is reported, in seconds. A CPU has one thread and
reports processor time, which other work hardly changes. `added` is the difference for one layer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from common import cpu_name, provenance, write_rows

from ridgeline.ops.choose import choose
from ridgeline.ops.merge import with_sinks
from ridgeline.ops.step import KvView, StepInputs

HEADS, KV_HEADS, SIZE, PAGE = 64, 8, 64, 16
WINDOWS = {"window": 128, "full": None}
CASES = {"decode-1": (1, 4096, 1), "decode-32": (32, 2048, 1), "chunk-256": (1, 2048, 256)}
"""Row -> requests at once, slots of each, query tokens of each."""


def step_of(case: str, window: int | None, device: torch.device) -> tuple[torch.Tensor, KvView, StepInputs]:
    """(queries, cache, step) of random numbers."""
    rows, length, queries = CASES[case]
    pages = -(-length // PAGE)
    kv = torch.randn(rows * pages + 1, 2, KV_HEADS, PAGE, SIZE, dtype=torch.bfloat16, device=device)
    table = torch.arange(1, rows * pages + 1, dtype=torch.int32, device=device).view(rows, pages)
    last = torch.arange(length - queries, length, dtype=torch.int32, device=device)
    counted = torch.arange(rows + 1, dtype=torch.int32, device=device)
    lengths = torch.full((rows,), length, dtype=torch.int32, device=device)
    row_of = counted[:-1].repeat_interleave(queries)
    step = StepInputs(counted[:-1], counted * queries, lengths, last.repeat(rows), row_of, queries, length)
    slots = table.long()[row_of, step.position.long() // PAGE] * PAGE + step.position % PAGE
    view = KvView(kv=kv, table=table, slots=slots, window=window, softcap=None, scale=SIZE**-0.5)
    return torch.randn(rows * queries, HEADS, SIZE, dtype=torch.bfloat16, device=device), view, step


def seconds(call: Callable[[], object], device: torch.device) -> float:
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    begun = clock()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--out")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(1)
    origin = provenance(cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device))
    attend = choose(device, torch.bfloat16).attention.attend
    calls = {"without": attend, "with": with_sinks(attend, torch.randn(HEADS, dtype=torch.bfloat16, device=device))}
    rows = []
    for case in CASES:
        for name, window in WINDOWS.items():
            q, view, step = step_of(case, window, device)
            k, v = torch.randn(2, len(q), KV_HEADS, SIZE, dtype=torch.bfloat16, device=device)
            case_inputs = q, k, v, view, step
            times: dict[str, list[float]] = {kind: [] for kind in calls}
            for _ in range(options.repeats + 3):
                for kind, call in calls.items():
                    times[kind].append(seconds(partial(call, *case_inputs), device))
            shortest = {kind: min(values[3:]) for kind, values in times.items()}
            shortest["added"] = shortest["with"] - shortest["without"]
            for kind, value in shortest.items():
                row = {"row": f"{device.type}-{case}-{name}-{kind}-s", "value": round(value, 8), "unit": "s"}
                rows.append({**row, "target": None, **origin})
                print(rows[-1]["row"], rows[-1]["value"])
    if options.out:
        write_rows(options.out, rows)


if __name__ == "__main__":
    main()
