"""One server under measurement: found out once, then measured as often as wanted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

import ridgeline
from ridgeline.bench import options
from ridgeline.bench.clock import Alarm
from ridgeline.bench.efficiency import metric
from ridgeline.bench.load import Plan, Writer, send_all
from ridgeline.bench.options import DEFAULT_CONCURRENCY, LoadConfig, ResultConfig, TargetConfig, WorkloadConfig
from ridgeline.bench.probe import fetch, probe
from ridgeline.bench.prompts import Prompts
from ridgeline.bench.record import Run
from ridgeline.bench.server_state import ServerState
from ridgeline.bench.target import Client
from ridgeline.bench.workload import Workload
from ridgeline.core.slo import Slo

WHYS = 10
"""Slowest requests whose why is asked for."""

Progress = Callable[[int, int], None]
"""Told (requests ended, requests in all)."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Everything a user said."""

    target: TargetConfig = field(default_factory=TargetConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    result: ResultConfig = field(default_factory=ResultConfig)

    def __post_init__(self) -> None:
        options.check((self.target, self.workload, self.load, self.result))


class Session:
    """`async with Session(asked) as session`: `measure` makes one run after the other against one server.

    url: instead of the one asked for. progress: told how far a run is.
    """

    def __init__(self, asked: Asked, url: str | None = None, progress: Progress | None = None) -> None:
        self._asked = asked
        self._slo = Slo.parse(asked.result.slo)
        self._known, self._ids, self._chat = options.dialect(asked.target)
        self._source = options.source(asked.workload, asked.load)
        self.client = Client(options.address(asked.target, url), asked.target.timeout_s)
        self._progress = progress or (lambda done, all: None)
        self._runs = 0

    async def __aenter__(self) -> Session:
        await self.client.open()
        dialect, self._vocabulary = await probe(self.client, self._known, ids=self._ids, chat=self._chat)
        self.dialect = replace(dialect, context=self._asked.target.context or dialect.context)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.client.close()

    async def measure(self, load: LoadConfig | None = None, label: str = "") -> Run:
        """Make one run. load: instead of the one asked for.

        Each further run has prompts of its own, so that none finds its prompts in the server's cache from the last one;
        times stay those of the seed.
        """
        load = load or self._asked.load
        workload, dropped = options.timed(self._workload(load), self.dialect.context, self._asked.workload, load)
        concurrency = load.concurrency
        if not workload.timed and concurrency is None:
            concurrency = DEFAULT_CONCURRENCY
        writer = Writer(self.client.address, self.dialect, self._prompts("run"))
        with Alarm() as clock:
            if load.warmup:
                warm = replace(workload.first(load.warmup), timed=False)
                other = Writer(self.client.address, self.dialect, self._prompts("warm"))
                await send_all(Plan(warm, load.warmup, label="warm"), self.client, other, clock)
            if not workload.timed:
                await self.client.warm(min(concurrency or 1, len(workload.asks)))
            # The time makes ids unique, so that the server's ledger knows this run's requests from others'.
            label_of_ids = f"bench-{time.time_ns() // 1_000_000:x}-{self._runs}"
            plan = Plan(workload, concurrency, load.duration, label_of_ids)
            total = len(workload.asks)
            state = ServerState(self.client, total, lambda done: self._progress(done, total))
            sent = await send_all(plan, self.client, writer, clock, state.watch)
        self._runs += 1
        facts = {**self._facts(workload, load, concurrency, label), "server": await state.read()}
        return Run(facts, sent.rows, sent.seconds, dropped, sent.loop_lag_s, sent.cpu_s, self._slo)

    async def metric(self, name: str) -> float | None:
        """Sum of a metric of the server's /metrics, None where it is not there."""
        reply = await fetch(self.client, "/metrics")
        return metric(reply.text, name) if reply.status == 200 else None

    async def whys(self, run: Run) -> list[dict[str, Any]]:
        """What the server itself says of the slowest requests (GET /requests/ID/why), where it is one of ours."""
        found = []
        for row in sorted(run.rows, key=lambda one: one.e2e_s or one.ended_s - one.scheduled_s, reverse=True)[:WHYS]:
            reply = await fetch(self.client, f"/requests/{row.answer_id}/why") if row.answer_id else None
            if reply is None or reply.status != 200:
                continue
            try:
                found.append({**msgspec.json.decode(reply.text, type=dict), "id": row.id})
            except msgspec.DecodeError:
                continue
        return found

    def _workload(self, load: LoadConfig) -> Workload:
        """The source; drawn anew where a further load needs more requests than the first."""
        if self._asked.workload.trace or load is self._asked.load:
            return self._source
        return options.source(self._asked.workload, load)

    def _prompts(self, what: str) -> Prompts:
        return Prompts(self._vocabulary, f"{self._asked.workload.seed} {what} {self._runs}")

    def _facts(self, workload: Workload, load: LoadConfig, concurrency: int | None, label: str) -> dict[str, Any]:
        rate = load.rate if load.rate is not None else workload.rate if workload.timed else None
        return {
            "url": self.client.address.url,
            "model": self.dialect.model,
            "chat": self.dialect.chat,
            "prompts": "ids" if self.dialect.ids else "text",
            "context": self.dialect.context,
            "workload": workload.name,
            "fingerprint": workload.fingerprint,
            "seed": self._asked.workload.seed,
            "rate": rate,
            "burstiness": load.burstiness,
            "concurrency": concurrency,
            "time_scale": load.time_scale,
            "label": label or self._asked.result.label,
            "started_at": time.time(),
            "version": ridgeline.__version__,
        }
