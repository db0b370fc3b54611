"""Where a step of two stages waits, seen from the first rank, which is the last stage:

    python benchmarks/stages_timeline.py --model benchmarks/models/llama-3.1-8b [--rows 64] [--out FILE]

Medians over the decode steps of a run, in milliseconds. A step is planned, sent to the other stage and launched here (`launch`).
Its result is waited for (`collect`). `flight` is the time from its launch to its result; it holds the other stage's host and GPU,
and this GPU. `between` is the host's time from a result to the next launch: commit, reply, plan. On this stage's GPU: `period`
from one stream's arrival to the next; `wait`, the receive and what lies idle before it; `work`, everything else. `sizes` are the
rows of consecutive steps: as many steps per token as there are different groups of them. `other` is flight less
this GPU's work: the other stage's host and GPU, and what either GPU still had to do.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from common import HERE, provenance, timed, write_rows
from multi_gpu import started
from timeline import Span, spans
from torch.profiler import ProfilerActivity, profile

from ridgeline.core.plan import StepPlan, StepResult
from ridgeline.engine.loop import Runner

PROMPT, OUTPUT = 256, 96
MIDDLE = slice(1, 3)
"""Of four quarters of a run, those that are looked at: decode steps only."""


@dataclass(slots=True)
class Step:
    """Host times of a step in seconds, on one clock."""

    rows: int
    launch: float
    launched: float = 0.0
    collect: float = 0.0
    collected: float = 0.0


@dataclass
class Watched:
    """A runner whose calls are timed."""

    runner: Runner
    steps: list[Step] = field(default_factory=list)
    flight: deque[Step] = field(default_factory=deque)

    def launch(self, plan: StepPlan) -> None:
        step = Step(len(plan.rows), time.perf_counter())
        self.runner.launch(plan)
        step.launched = time.perf_counter()
        self.steps.append(step)
        self.flight.append(step)

    def collect(self) -> StepResult:
        step = self.flight.popleft()
        step.collect = time.perf_counter()
        result = self.runner.collect()
        step.collected = time.perf_counter()
        return result

    def close(self) -> None:
        self.runner.close()


def host_times(steps: Sequence[Step]) -> dict[str, float]:
    """Medians over steps in ms. between: from the last result before a launch."""
    results = sorted(step.collected for step in steps)
    between = [
        step.launch - max(result for result in results if result <= step.launch)
        for step in steps
        if results[0] <= step.launch
    ]
    return {
        "launch_ms": _ms(step.launched - step.launch for step in steps),
        "collect_ms": _ms(step.collected - step.collect for step in steps),
        "flight_ms": _ms(step.collected - step.launch for step in steps),
        "between_ms": _ms(between),
    }


def device_times(kernels: Iterable[Span]) -> dict[str, float]:
    """Medians over the steps between two arrivals of a stream. wait: from the end of all work to the end of the next receive."""
    periods: list[float] = []
    waits: list[float] = []
    arrived = end = None
    for span in sorted(kernels, key=lambda item: (item.begin, item.end)):
        if "nccl" in span.name.lower():
            if arrived is not None and end is not None:
                periods.append(span.end - arrived)
                waits.append(span.end - min(end, span.end))
            arrived = span.end
        end = span.end if end is None else max(end, span.end)
    work = [period - wait for period, wait in zip(periods, waits, strict=True)]
    times = {"period_ms": periods, "wait_ms": waits, "work_ms": work}
    return {name: round(median(each) / 1e3, 3) for name, each in times.items()}


def _ms(seconds: Iterable[float]) -> float:
    return round(median(seconds) * 1e3, 3)


def middle(count: int) -> slice:
    return slice(MIDDLE.start * count // 4, MIDDLE.stop * count // 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE / "models" / "llama-3.1-8b")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    engine, _ = started(args.model, "", {"pipeline_parallel_size": 2}, most=4096)
    try:
        loop, vocab = engine.engine.loop, engine.engine.setup.vocab_size
        shapes = [(PROMPT, OUTPUT)] * args.rows
        timed(engine, shapes, vocab)
        watched = loop.runner = Watched(loop.runner)
        timed(engine, shapes, vocab)  # the host's times, without a profiler
        steps = watched.steps[middle(len(watched.steps))]
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            timed(engine, shapes, vocab)
            torch.cuda.synchronize()
    finally:
        engine.close()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        kernels = sorted(spans(json.loads(path.read_text())["traceEvents"]), key=lambda span: span.begin)
    host, device = host_times(steps), device_times(kernels[middle(len(kernels))])
    other = round(host["flight_ms"] - device["work_ms"], 3)
    sizes = [step.rows for step in steps[:6]]
    row = {"row": f"stages-timeline-{args.rows}", **host, **device, "other_ms": other, "sizes": sizes}
    print(row, flush=True)
    if args.out:
        write_rows(args.out, [row | provenance(f"2 x {torch.cuda.get_device_name()}", args.commit)])


if __name__ == "__main__":
    main()
