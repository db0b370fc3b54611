"""What measuring costs: the same work with all records kept, and with none.

    python benchmarks/measuring.py --out benchmarks/results/measuring.json

The shipped model in this process, one thread: 16 requests at once, 128 tokens in and 128 out, greedy, in runs that take
turns. On: every step is accounted (FLOPs, bytes, energy), its record goes to the service's metrics, and these are rendered
once per second as for a scraper. Off: no account and no reader. Rates are per second of processor time, which others on the
machine take away from neither side. The difference is the median of the pairs' differences, its interval the bootstrap's
central 95 %; the order within a pair changes from pair to pair. `direct` is the share of a run inside the account, the reader
of records and the scrapes, in runs of their own; a service has only the account in the engine's process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from common import cpu_name, provenance, timed, write_rows

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.engine.local import LocalEngine
from ridgeline.metrics.account import Account, Accounted, Committed
from ridgeline.metrics.metrics import Metrics
from ridgeline.wire.messages import StepStats

REQUESTS, PROMPT, OUTPUT = 16, 128, 128
DRAWS = 10_000


class Records:
    """A reader of steps that keeps metrics and is scraped once per second."""

    def __init__(self) -> None:
        self._metrics = Metrics("measured")
        self.render: Callable[[], bytes] = self._metrics.render
        self._due = time.perf_counter() + 1.0

    def on_step(self, step: StepStats) -> None:
        self._metrics.on_step(step)
        if time.perf_counter() >= self._due:
            self.render()
            self._due = time.perf_counter() + 1.0


class Sides:
    """One engine with measuring on or off."""

    def __init__(self) -> None:
        self._engine = LocalEngine.start(ModelConfig(), EngineConfig(device="cpu", threads=1)).engine
        self._setup = self._engine.setup
        self.facts = {"model": "ridgeline-14m", "ops": self._setup.facts["ops"]}

    def on(self) -> float:
        """Output tokens per second of processor time with everything recorded."""
        self._engine.setup = self._setup
        return self._rate(Records().on_step)

    def off(self) -> float:
        """Output tokens per second with nothing accounted and nobody to read the steps' records."""
        self._engine.setup = replace(self._setup, account=Account())
        return self._rate(None)

    def direct(self) -> dict[str, float]:
        """Shares of a run's time that are spent on measuring, by part."""
        account, reader, scrape = Clocked(), Clocked(), Clocked()
        step = account.of(self._setup.account.step)
        self._engine.setup = replace(self._setup, account=ClockedAccount(step))
        records = Records()
        records.render = scrape.of(records.render)
        seconds = REQUESTS * OUTPUT / self._rate(reader.of(records.on_step))
        parts = {"account": account.seconds, "records": reader.seconds - scrape.seconds, "scrapes": scrape.seconds}
        return {name: spent / seconds for name, spent in parts.items()}

    def _rate(self, on_step: Callable[[StepStats], None] | None) -> float:
        shapes = [(PROMPT, OUTPUT)] * REQUESTS
        local = LocalEngine(self._engine, on_step)
        before = time.thread_time()
        timed(local, shapes, self._setup.vocab_size, temperature=0.0)
        return REQUESTS * OUTPUT / (time.thread_time() - before)


class Clocked:
    """Adds up the processor seconds that calls of a function take, those of the clock included."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*given: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*given)
            finally:
                self.seconds += time.thread_time() - started

        return clocked


@dataclass(frozen=True, slots=True)
class ClockedAccount:
    """An account whose steps are clocked."""

    step: Callable[[Committed, int, float], Accounted]


def interval(values: list[float]) -> tuple[float, float]:
    """Central 95 % of the medians of samples drawn with replacement."""
    drawn = np.random.default_rng(0).choice(values, (DRAWS, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40, help="runs of each side")
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sides = Sides()
    sides.on()
    sides.off()
    on: list[float] = []
    off: list[float] = []
    for pair in range(arguments.pairs):
        order = ((sides.on, on), (sides.off, off))
        for side, seconds_of_side in order if pair % 2 else reversed(order):
            seconds_of_side.append(side())
    direct = [sides.direct() for _ in range(5)]
    parts = {name: statistics.median(row[name] for row in direct) for name in direct[0]}
    lost = [1 - mine / bare for mine, bare in zip(on, off, strict=True)]
    low, high = interval(lost)
    row = {
        "row": "shipped-cpu-measuring",
        **sides.facts,
        "on_tok_s": round(statistics.median(on), 1),
        "off_tok_s": round(statistics.median(off), 1),
        "unit": "output tok per second of processor time",
        "cost": round(statistics.median(lost), 5),
        "cost_low": round(low, 5),
        "cost_high": round(high, 5),
        "direct": round(sum(parts.values()), 5),
        **{f"direct_{name}": round(share, 5) for name, share in parts.items()},
        "target": 0.01,
        "pairs": arguments.pairs,
        "each": [[round(mine, 1), round(bare, 1)] for mine, bare in zip(on, off, strict=True)],
        **provenance(cpu_name()),
    }
    print(row)
    if arguments.out:
        write_rows(arguments.out, [row])


if __name__ == "__main__":
    main()
