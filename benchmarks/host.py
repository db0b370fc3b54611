"""Times what the host does for each step while a device that costs nothing stands in: plan, commit and reply.

    python benchmarks/host.py --out benchmarks/results/host.json [--rows 64 256 512] [--steps 1000] [--profile]

decode: all rows go on, contexts of about 1,200 tokens. mixed: every answer has 200 tokens on average, so that rows end and
prompts of about 1,155 tokens enter all the time. reply: deltas and their encoding, as the engine process sends them. all:
plan, commit and reply. prepare, read: what the runner does on the host before a step is launched and after it has ended.
Nothing here waits, so time is the thread's CPU time: what else the machine does is left out.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from common import cpu_name, provenance, write_rows

from ridgeline.core.plan import Flag, StepPlan, StepResult
from ridgeline.core.sampling import SamplingParams
from ridgeline.core.spec import KV_FORMATS, KvGroup, KvLayout
from ridgeline.engine.batch import Batch, BatchBuilder
from ridgeline.engine.device import Outcome
from ridgeline.engine.engine import Engine, Setup
from ridgeline.engine.leases import Leases
from ridgeline.engine.loop import Loop
from ridgeline.engine.packet import Packet
from ridgeline.engine.policy import admission
from ridgeline.engine.result import Clock, Pending
from ridgeline.engine.row_table import RowTable
from ridgeline.engine.scheduler import Limits, Scheduler
from ridgeline.ops.rows import to_host
from ridgeline.wire.frames import encode
from ridgeline.wire.messages import Submit

LAYOUT = KvLayout((KvGroup(tuple(range(32)), None, 32),), 64, 64 * 128 * 1024, KV_FORMATS["bfloat16"])
VOCAB = 128_256
CPU = torch.device("cpu")
MAX_LEN = 8192
STEP_TOKENS = 8192
PROMPT = 1155
ANSWER = 200
TARGET_MS = 1.0
"""For plan, commit and reply of 512 rows that decode."""


class FreeDevice:
    """The runner's protocol without a model: every row that samples gains one token, and a row at its limit ends. What a
    runner does on the host is done as the runner does it, and timed."""

    def __init__(self, rows: int, tokens: torch.Tensor) -> None:
        self._known = torch.zeros(rows + 1, dtype=torch.int32)
        self._limit = torch.zeros(rows + 1, dtype=torch.int32)
        self._tokens = tokens
        self._rows = RowTable(LAYOUT, rows, MAX_LEN, VOCAB, CPU)
        self._rows._host = None  # packets, as for a GPU
        self._pending: deque[Pending] = deque()
        self._last: tuple[StepPlan, Batch] | None = None
        self.prepare_s = self.read_s = 0.0
        self.seconds = 0.0
        """Spent here since the last reset; it is no part of the scheduler's time."""

    def launch(self, plan: StepPlan) -> None:
        started = time.thread_time()
        clock = Clock(cuda=False)
        batch = self._prepare(plan)
        self.prepare_s = time.thread_time() - started
        for join in plan.joins:
            self._known[join.row] = len(join.tokens)
            self._limit[join.row] = join.limit
        rows = batch.sampled.long()
        drawn = (self._known[rows] < self._limit[rows]).int()
        self._known[rows] += drawn
        flag = (self._known[rows] >= self._limit[rows]).int() * int(Flag.LIMIT) * drawn
        tokens = self._tokens[plan.step % 1000 :][: len(rows)]
        outcome = Outcome(torch.stack((drawn, flag, tokens), dim=1))
        self._pending.append(Pending.of(plan, batch, outcome, clock, to_host))
        self.seconds += time.thread_time() - started

    def _prepare(self, plan: StepPlan) -> Batch:
        """As Runner does: who sits where, what changes, and the step's arrays unless the last ones serve again."""
        self._rows.assign(plan)
        batch = self._last[1] if self._last is not None and plan.repeats(self._last[0]) else None
        if batch is None or plan.changes_device_state:
            packet, builder = Packet(), None
            self._rows.pack_changes(plan, packet)
            if batch is None:
                plan, _ = self._rows.drop_lost(plan)
                builder = BatchBuilder(plan, self._rows)
                builder.pack(packet, builder.shape)
            got = packet.send(CPU)
            self._rows.write_changes(got)
            batch = batch if builder is None else builder.build(got)
            assert batch is not None
        self._last = plan, batch
        return batch

    def collect(self) -> StepResult:
        started = time.thread_time()
        result = self._pending.popleft().result()
        self.read_s = time.thread_time() - started
        self.seconds += self.read_s
        return result

    def close(self) -> None:
        self._pending.clear()


@dataclass
class Times:
    """Seconds of each step, by part."""

    parts: dict[str, list[float]] = field(default_factory=dict)

    def add(self, **seconds: float) -> None:
        for name, value in seconds.items():
            self.parts.setdefault(name, []).append(value)


class Bench:
    """An engine over a free device, and requests for it."""

    def __init__(self, rows: int, prefix_cache: bool) -> None:
        chance = random.Random(1)
        self._pool = [chance.randrange(VOCAB) for _ in range(1 << 16)]
        self._chance = chance
        self._count = 0
        self.device = FreeDevice(rows, torch.tensor(self._pool, dtype=torch.int32))
        leases = Leases(LAYOUT, 40 * rows, prefix_cache=prefix_cache)
        self.scheduler = Scheduler(LAYOUT, leases, Limits(rows, STEP_TOKENS, MAX_LEN), admission("continuous"))
        loop = Loop(self.scheduler, self.device, steps_in_flight=1)
        self.engine = Engine(loop, Setup(MAX_LEN, VOCAB, (2,), "bench", 0, {}))

    def submit(self, answer: int) -> None:
        start, length = self._chance.randrange(1 << 15), PROMPT + self._chance.randrange(-300, 301)
        self._count += 1
        sampling = SamplingParams(temperature=1.0, max_tokens=answer, ignore_eos=True, seed=self._count)
        ids = self._pool[start : start + length]
        self.engine.handle(Submit(f"cmpl-{self._count:032d}-0", ids, sampling, time.monotonic()))

    def step(self, times: Times) -> int:
        """One turn, timed; returns how many choices ended."""
        device, scheduler = self.device, self.scheduler
        device.seconds = 0.0
        spent = dict.fromkeys(("plan", "commit"), 0.0)
        plan, commit = scheduler.plan, scheduler.commit
        scheduler.plan, scheduler.commit = _timed(plan, spent, "plan"), _timed(commit, spent, "commit")  # type: ignore[method-assign]
        started = time.thread_time()
        frame = self.engine.turn()
        if frame is not None:
            encode(frame)
        total = time.thread_time() - started - device.seconds
        scheduler.plan, scheduler.commit = plan, commit  # type: ignore[method-assign]
        times.add(**spent, reply=total - sum(spent.values()), all=total, prepare=device.prepare_s, read=device.read_s)
        return sum(bool(delta.finish) for delta in frame.deltas) if frame is not None else 0


def _timed(function: Callable[..., Any], spent: dict[str, float], name: str) -> Callable[..., Any]:
    def run(*arguments: object) -> Any:
        started = time.thread_time()
        result = function(*arguments)
        spent[name] = time.thread_time() - started
        return result

    return run


def decode(rows: int, steps: int, prefix_cache: bool) -> Times:
    """All rows decode; nobody comes or goes."""
    bench, times = Bench(rows, prefix_cache), Times()
    for _ in range(rows):
        bench.submit(steps + 500)
    while any(request.planned < request.prompt_len for request in bench.scheduler.running) or bench.scheduler.waiting:
        bench.step(Times())
    return _run(bench, times, steps, 0)


def mixed(rows: int, steps: int, prefix_cache: bool) -> Times:
    """Answers end and others enter; as many requests are open as there are rows, and some wait."""
    bench, times = Bench(rows, prefix_cache), Times()
    for _ in range(rows + rows // 4):
        bench.submit(1 + bench._chance.randrange(2 * ANSWER))
    for _ in range(ANSWER):
        for _ in range(bench.step(Times())):
            bench.submit(1 + bench._chance.randrange(2 * ANSWER))
    return _run(bench, times, steps, 2 * ANSWER)


def _run(bench: Bench, times: Times, steps: int, answer: int) -> Times:
    gc.collect()
    gc.freeze()
    for _ in range(steps):
        for _ in range(bench.step(times)):
            bench.submit(1 + bench._chance.randrange(answer))
    gc.unfreeze()
    return times


def rows_of(scenario: str, count: int, times: Times) -> list[dict[str, Any]]:
    """One result row per part, in milliseconds."""
    results = []
    for part, seconds in times.parts.items():
        at = sorted(seconds)
        row: dict[str, Any] = {
            "row": f"host-{scenario}-{count}-{part}-ms",
            "value": round(statistics.median(at) * 1e3, 3),
            "unit": "ms",
            "p99": round(at[int(0.99 * len(at))] * 1e3, 3),
            "max": round(at[-1] * 1e3, 3),
        }
        if (scenario, count, part) == ("decode", 512, "all"):
            row["target"] = TARGET_MS
        results.append(row)
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="result file to merge the rows into")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--prefix-cache", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print where the time goes instead")
    given = parser.parse_args(arguments)
    facts = provenance(cpu_name())
    results = []
    for scenario, run in (("decode", decode), ("mixed", mixed)):
        for count in given.rows:
            profile = cProfile.Profile()
            if given.profile:
                profile.enable()
            times = run(count, given.steps, given.prefix_cache)
            if given.profile:
                profile.disable()
                pstats.Stats(profile).sort_stats("tottime").print_stats(18)
            for row in rows_of(scenario, count, times):
                results.append(row | facts)
                print(f"{row['row']:32s} p50 {row['value']:7.3f}  p99 {row['p99']:7.3f}  max {row['max']:7.3f}")
    if given.out:
        write_rows(given.out, results)


if __name__ == "__main__":
    main()
