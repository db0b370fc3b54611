"""Where the time of a step goes on a GPU, kernel by kernel, as the engine runs it:

    python benchmarks/timeline.py --model benchmarks/models/llama-3.1-8b --steps decode:1x128,verify:128x256+1

Steps are named as in benchmarks/ledger.py. The profiler gives the begin and end of every kernel. A kernel's increment is how
much later it ends than all before it; where kernels overlap, only that is what the step waits for it. Increments add up to
the time from the first step's end to the last's, so nothing is left over: what lies between two kernels is the later one's.
`alone` is how long the kernel was on the device, its wait for the one before included. Kernels are told apart by name and
number of programs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import provenance, write_rows
from ledger import WARMING, Case, Whole, load, parse
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, slots=True)
class Span:
    """One kernel, copy or fill on the device: microseconds."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Share:
    """What one kind of kernel takes of a step: runs, the increments of all of them, and their own durations."""

    kernel: str
    runs: float
    step_us: float
    alone_us: float


def spans(events: Iterable[dict[str, Any]]) -> list[Span]:
    """What ran on the device, from the events of a Chrome trace."""
    result = []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            grid = event.get("args", {}).get("grid", ())
            name = f"{event['name'].split('<')[0][-40:]} {'x'.join(map(str, grid))}".strip()
            result.append(Span(name, event["ts"], event["ts"] + event["dur"]))
    return result


def shares(spans: Iterable[Span], steps: int) -> list[Share]:
    """Increments by kind of kernel, per step, the largest first."""
    gained: dict[str, list[float]] = {}
    end: float | None = None
    for span in sorted(spans, key=lambda item: (item.begin, item.end)):
        entry = gained.setdefault(span.name, [0, 0.0, 0.0])
        entry[0] += 1
        entry[1] += max(0.0, span.end - (span.begin if end is None else end))
        entry[2] += span.end - span.begin
        end = span.end if end is None else max(end, span.end)
    kinds = [Share(name, *(number / steps for number in entry)) for name, entry in gained.items()]
    return sorted(kinds, key=lambda kind: -kind.step_us)


def trace(whole: Whole, case: Case, steps: int) -> list[Span]:
    """What `steps` steps of a case leave on the device, after some that are not looked at."""
    whole.run(case, 0, WARMING)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        whole.run(case, WARMING, steps)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        return spans(json.loads(path.read_text())["traceEvents"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with a config.json")
    parser.add_argument("--steps", required=True, help="comma-separated steps, see benchmarks/ledger.py")
    parser.add_argument("--quantization", default="", help="number format of the layers' matrices (fp8)")
    parser.add_argument("--kv-cache-dtype", default="auto", help="format of keys and values (fp8, int8, int4)")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--lines", type=int, default=16, help="kernels to print")
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--commit", default="", help="what was measured, where there is no .git to ask")
    arguments = parser.parse_args()
    cases = [parse(step) for step in arguments.steps.split(",")]
    about = provenance(torch.cuda.get_device_name(), arguments.commit)
    with torch.inference_mode():
        model = load(arguments, torch.device("cuda"), arguments.kv_cache_dtype)
        whole = Whole(model, cases, arguments.repeats)
        for case in cases:
            kernels = shares(trace(whole, case, arguments.repeats), arguments.repeats)
            name = "-".join(
                filter(None, (Path(arguments.model).name, model.spec.quantization, model.spec.kv_format, case.name))
            )
            print(f"\n{name}: {sum(kernel.step_us for kernel in kernels):.1f} us a step")
            print(f"{'kernel':50}{'runs':>7}{'us a step':>11}{'us a run':>10}{'alone':>8}")
            for kernel in kernels[: arguments.lines]:
                runs = f"{kernel.step_us / kernel.runs:10.2f}{kernel.alone_us / kernel.runs:8.2f}"
                print(f"{kernel.kernel:50}{kernel.runs:7.1f}{kernel.step_us:11.1f}{runs}", flush=True)
            if arguments.out:
                rows = [{"row": f"{name}-{kernel.kernel}", **asdict(kernel), **about} for kernel in kernels]
                write_rows(arguments.out, rows)


if __name__ == "__main__":
    main()
