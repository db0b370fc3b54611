"""Replays a recorded workload on a server of its own, to measure what a prediction promised."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from ridgeline.bench.options import LoadConfig
from ridgeline.bench.record import Run
from ridgeline.bench.server_process import serving
from ridgeline.bench.session import BenchConfig, Session
from ridgeline.core.workload import Workload
from ridgeline.planner.simulate import Figures, Outcome

_WARM_UP = 4
"""Requests before the replay that are not counted."""


def replay(flags: Sequence[str], workload: Workload, concurrency: int | None = None) -> Run:
    """Start `ridgeline serve FLAGS`, send the workload, stop the server.

    Prompts are generated, with the recorded lengths and shared prefixes. concurrency: requests in a closed loop; None: at the
    recorded times. Raises RidgelineError if the server does not start.
    """
    return asyncio.run(_replay(flags, workload, concurrency))


async def _replay(flags: Sequence[str], workload: Workload, concurrency: int | None) -> Run:
    config = BenchConfig(load=LoadConfig(concurrency=concurrency, warmup=min(_WARM_UP, len(workload.requests))))
    async with serving(flags) as url, Session(config, url, workload=workload) as session:
        return await session.measure()


def measured(run: Run) -> Figures:
    """The figures of a run, as a simulation states them."""
    outcomes = [
        Outcome(
            math.nan if row.ttft_s is None else row.ttft_s,
            math.nan if row.tpot_s is None else row.tpot_s,
            row.e2e_s or 0.0,
            max(row.gaps_s, default=math.nan),
            row.output_tokens,
        )
        for row in run.completed
    ]
    counted = run.facts.get("counted") or {}
    return Figures.of(outcomes, run.seconds, counted.get("busy_s", math.nan))
