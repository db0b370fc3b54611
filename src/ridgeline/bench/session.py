"""A measurement session with one server: its features are probed once, then runs are made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

import ridgeline
from ridgeline.bench import options
from ridgeline.bench.clock import Alarm
from ridgeline.bench.efficiency import COUNTERS, metric
from ridgeline.bench.load import Plan, Writer, send_all
from ridgeline.bench.options import DEFAULT_CONCURRENCY, LoadConfig, ResultConfig, TargetConfig, WorkloadConfig
from ridgeline.bench.probe import fetch, probe
from ridgeline.bench.prompts import Prompts
from ridgeline.bench.record import Run
from ridgeline.bench.server_state import ServerState
from ridgeline.bench.target import Client
from ridgeline.core.slo import Slo
from ridgeline.core.workload import Workload

PROGRESS_S = 1.0
"""Seconds between two reports of the progress."""
EXPLAINED_REQUESTS = 10
"""Number of slowest requests whose explanation is fetched."""

Progress = Callable[[int, int], None]
"""Called with (ended requests, all requests)."""


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """All options of a benchmark."""

    target: TargetConfig = field(default_factory=TargetConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    result: ResultConfig = field(default_factory=ResultConfig)

    def __post_init__(self) -> None:
        options.check((self.target, self.workload, self.load, self.result))


class Session:
    """Makes runs against one server: `async with Session(config) as session: await session.measure()`."""

    def __init__(
        self,
        config: BenchConfig,
        url: str | None = None,
        progress: Progress | None = None,
        workload: Workload | None = None,
    ) -> None:
        """url: replaces `config.target.url`. workload: replaces `config.workload`."""
        self._config = config
        self._slo = Slo.parse(config.result.slo)
        self._dialect, self._ids, self._chat = options.dialect(config.target)
        self._source = workload or options.source(config.workload, config.load)
        if config.workload.run_ids:
            options.check_conversations(self._source)
        self.client = Client(options.address(config.target, url), config.target.timeout_s)
        self._progress = progress or (lambda done, all: None)
        self._runs = 0

    async def __aenter__(self) -> Session:
        await self.client.open()
        dialect, self._vocabulary = await probe(self.client, self._dialect, ids=self._ids, chat=self._chat)
        self.dialect = replace(dialect, context=self._config.target.context or dialect.context)
        self.client.shows_reasoning = dialect.shows_reasoning
        return self

    async def __aexit__(self, *_: object) -> None:
        self.client.close()

    async def measure(self, load: LoadConfig | None = None, label: str = "", partial: bool = False) -> Run:
        """Make one run. load: replaces `config.load`. partial: Ctrl-C ends the run instead of discarding it.

        Each run has other prompts, so that the server's prefix cache does not contain them. Arrival times are the same.
        """
        load = load or self._config.load
        workload, dropped = options.schedule(self._workload(load), self.dialect.context, self._config.workload, load)
        concurrency = load.concurrency
        if not workload.timed and concurrency is None:
            concurrency = DEFAULT_CONCURRENCY
        writer = Writer(self.client.address, self.dialect, self._prompts("run"))
        # The time makes ids unique in the server's ledger.
        label_of_ids = f"bench-{time.time_ns() // 1_000_000:x}-{self._runs}"
        plan = Plan(workload, concurrency, load.duration, label_of_ids, self._config.workload.run_ids, partial)
        total = len(workload.requests)
        state = ServerState(self.client, label_of_ids, total, lambda done: self._progress(done, total))
        async with _repeated(lambda: self._progress(state.done, total)):
            with Alarm() as clock:
                await self._warm_up(workload, load, concurrency, clock)
                before = await self._counters()
                sent = await send_all(plan, self.client, writer, clock, state.watch)
            after = await self._counters()
        self._runs += 1
        counted = {name: value - before[name] for name, value in after.items()} if before and after else None
        facts = {**self._facts(workload, load, concurrency, label), "server": await state.read(), "counted": counted}
        if sent.interrupted:
            facts["interrupted"] = (
                f"interrupted after {len(sent.rows)} of {total} requests; those in flight are not counted"
            )
        return Run(facts, sent.rows, sent.seconds, dropped, sent.loop_lag_s, sent.cpu_s, self._slo)

    async def _warm_up(self, workload: Workload, load: LoadConfig, concurrency: int | None, clock: Alarm) -> None:
        """Send the warm-up requests, and open as many connections as the run needs at once."""
        if load.warmup:
            first = replace(workload.first(load.warmup), timed=False)
            writer = Writer(self.client.address, self.dialect, self._prompts("warm"))
            await send_all(Plan(first, load.warmup, label="warm"), self.client, writer, clock)
        if not workload.timed:
            await self.client.warm(min(concurrency or 1, len(workload.requests)))

    async def _counters(self) -> dict[str, float] | None:
        """Read the counters of the server's work. None for other servers than Ridgeline, and for older ones."""
        reply = await fetch(self.client, "/metrics")
        if reply.status != 200:
            return None
        values = {name: metric(reply.text, full_name) for name, full_name in COUNTERS.items()}
        known = {name: value for name, value in values.items() if value is not None}
        return known if len(known) == len(values) else None

    async def whys(self, run: Run) -> list[dict[str, Any]]:
        """Fetch the explanations of the slowest requests (GET /requests/ID/why). Empty for other servers than Ridgeline."""
        explanations = []
        for row in sorted(run.rows, key=lambda row: row.e2e_s or row.ended_s - row.scheduled_s, reverse=True)[
            :EXPLAINED_REQUESTS
        ]:
            reply = await fetch(self.client, f"/requests/{row.answer_id}/why") if row.answer_id else None
            if reply is None or reply.status != 200:
                continue
            try:
                explanations.append({**msgspec.json.decode(reply.text, type=dict), "id": row.id})
            except msgspec.DecodeError:
                continue
        return explanations

    def _workload(self, load: LoadConfig) -> Workload:
        """Return the workload of a load. Random requests are generated again, because another load may need more of them."""
        if self._config.workload.trace or load is self._config.load:
            return self._source
        return options.source(self._config.workload, load)

    def _prompts(self, purpose: str) -> Prompts:
        return Prompts(self._vocabulary, f"{self._config.workload.seed} {purpose} {self._runs}")

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
            "shared_prefixes": any(
                request.blocks or request.text or request.session >= 0 for request in workload.requests
            ),
            "seed": self._config.workload.seed,
            "rate": rate,
            "burstiness": load.burstiness,
            "concurrency": concurrency,
            "time_scale": load.time_scale,
            "label": label or self._config.result.label,
            **self._config.result.prices,
            "started_at": time.time(),
            "version": ridgeline.__version__,
        }


@asynccontextmanager
async def _repeated(report: Callable[[], None]) -> AsyncIterator[None]:
    """Call `report` every PROGRESS_S in the block: a run of long answers ends no request for a while."""

    async def repeat() -> None:
        while True:
            report()
            await asyncio.sleep(PROGRESS_S)

    task = asyncio.ensure_future(repeat())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
