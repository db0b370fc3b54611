"""Agent runs: the calls (requests) of one agent that share the header x-run-id, such as plan, actions and answer.

A run begins with its first call and ends SILENCE_S after its last one. Its user waits from the arrival of the first call until
the last call shows its first visible content: that is the run's time to publish.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ridgeline.metrics.records import RequestRecord
from ridgeline.metrics.window import QUANTILES, Window

SILENCE_S = 120.0
"""Seconds without a call after which a run has ended. A later call with the same id begins another run."""
MAX_OPEN_RUNS = 4096
"""Most runs that have not ended. A further one ends the run that has been silent for the longest time."""
KEPT_RUNS = 1024
"""Ended runs that are kept."""
KEPT_CALLS = 32
"""Ids of a run's latest calls that are kept."""


@dataclass(slots=True)
class AgentRun:
    """The sums of one run. Times in seconds."""

    id: str
    arrived_at: float
    """Arrival of the first call, unix seconds."""
    active_at: float
    """When the run was last heard of, monotonic seconds."""
    ended: bool = False
    open_calls: int = 0
    """Calls that are being answered."""
    calls: int = 0
    """Calls that were answered or cut off."""
    cut_calls: int = 0
    """Of these, calls that were cut off."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    hidden_tokens: int = 0
    publish_s: float | None = None
    """From the arrival of the first call to the first visible content of the call that arrived last. None: it has none."""
    e2e_s: float = 0.0
    """From the arrival of the first call to the end of the last one."""
    device_s: float = 0.0
    joules: float = 0.0
    prompt_joules: float = 0.0
    output_joules: float = 0.0
    cost: float = 0.0
    """US dollars."""
    requests: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_CALLS))
    """Ids of the latest calls, as /requests/{id}/why accepts them."""
    last_arrived_at: float = 0.0
    """Arrival of the call that arrived last among the ended ones, unix seconds."""

    def add(self, record: RequestRecord, shares: Mapping[str, float]) -> None:
        """Add an ended call. shares: its energy and cost (Live.shares)."""
        self.arrived_at = min(self.arrived_at, record.arrived_at)
        self.calls += 1
        self.cut_calls += bool(record.cut)
        for name in ("prompt_tokens", "cached_tokens", "output_tokens", "hidden_tokens"):
            setattr(self, name, getattr(self, name) + getattr(record, name))
        self.device_s += record.spent.device_s
        for name in ("joules", "prompt_joules", "output_joules", "cost"):
            setattr(self, name, getattr(self, name) + shares[name])
        self.e2e_s = max(self.e2e_s, record.arrived_at + record.e2e_s - self.arrived_at)
        self.requests.append(record.id)
        if record.arrived_at >= self.last_arrived_at:
            self.last_arrived_at, self.publish_s = record.arrived_at, None
            if record.publish_s is not None:
                self.publish_s = record.arrived_at + record.publish_s - self.arrived_at


MEASURES: Mapping[str, tuple[str, Callable[[AgentRun], float | None]]] = {
    "publish_seconds": (
        "Seconds from the arrival of a run's first call to the first visible content of its last one.",
        lambda run: run.publish_s,
    ),
    "calls": ("Calls of a run.", lambda run: float(run.calls)),
    "tokens": ("Tokens of a run, prompt and output.", lambda run: float(run.prompt_tokens + run.output_tokens)),
    "cost_dollars": ("Dollars of a run, by its share of device time.", lambda run: run.cost or None),
    "joules": ("Joules of a run, by its share of device time.", lambda run: run.joules or None),
}
"""Measures of a run with live percentiles: help text, and value of a run (None: unknown)."""


class AgentRuns:
    """The runs of one server. Memory is bounded by MAX_OPEN_RUNS, KEPT_RUNS and KEPT_CALLS."""

    def __init__(self, span_s: float, on_end: Callable[[], None] = lambda: None) -> None:
        """span_s: seconds that the percentiles cover. on_end: called for each run that ends."""
        self._open: dict[str, AgentRun] = {}
        """The run heard of last is the last one."""
        self._ended: dict[str, AgentRun] = {}
        self._on_end = on_end
        self._windows = {name: Window(span_s) for name in MEASURES}

    def begin_call(self, now: float, run_id: str, arrived_at: float) -> None:
        """A call goes to the engine. `end_call` follows. now: monotonic seconds. arrived_at: unix seconds."""
        self._active(now, run_id, arrived_at).open_calls += 1

    def end_call(self, now: float, record: RequestRecord, shares: Mapping[str, float]) -> None:
        """A call has ended. now: monotonic seconds. shares: its energy and cost (Live.shares)."""
        run = self._active(now, record.run_id, record.arrived_at)
        run.open_calls = max(0, run.open_calls - 1)
        run.add(record, shares)

    def tick(self, now: float) -> None:
        """End the runs that have been silent for SILENCE_S. now: monotonic seconds."""
        silent = []
        for run in self._open.values():
            if now - run.active_at < SILENCE_S:
                break
            if not run.open_calls:
                silent.append(run)
        for run in silent:
            self._end(now, run)

    def find(self, run_id: str) -> AgentRun | None:
        """Find the newest kept run with this id."""
        return self._open.get(run_id) or self._ended.get(run_id)

    def count_open(self) -> int:
        """Count the runs that have not ended."""
        return len(self._open)

    def percentiles(self, now: float) -> dict[str, dict[str, float]]:
        """Return quantiles of the runs that ended in the span: {"calls": {"p50": 3.0, ...}, ...}. Without data: left out."""
        quantiles = {name: window.quantiles(now) for name, window in self._windows.items()}
        return {
            name: {f"p{share * 100:g}": value for share, value in zip(QUANTILES, values, strict=True)}
            for name, values in quantiles.items()
            if values[0] == values[0]
        }

    def _active(self, now: float, run_id: str, arrived_at: float) -> AgentRun:
        """Return the open run with this id as the one heard of last; a new one if there is none."""
        run = self._open.pop(run_id, None)
        if run is None:
            run = AgentRun(run_id, arrived_at, now)
            if len(self._open) >= MAX_OPEN_RUNS:
                self._end(now, next(iter(self._open.values())))
        run.active_at = now
        self._open[run_id] = run
        return run

    def _end(self, now: float, run: AgentRun) -> None:
        del self._open[run.id]
        run.ended = True
        self._ended.pop(run.id, None)
        if len(self._ended) >= KEPT_RUNS:
            del self._ended[next(iter(self._ended))]
        self._ended[run.id] = run
        self._on_end()
        for name, (_, read) in MEASURES.items():
            if (value := read(run)) is not None:
                self._windows[name].add(now, value)


def run_row(run: AgentRun) -> dict[str, Any]:
    """Build the response of GET /runs/{id}."""
    names = (
        "id", "arrived_at", "ended", "open_calls", "calls", "cut_calls", "prompt_tokens", "cached_tokens", "output_tokens",
        "hidden_tokens", "publish_s", "e2e_s", "device_s", "joules", "prompt_joules",
        "output_joules", "cost",
    )  # fmt: skip
    return {name: getattr(run, name) for name in names} | {"requests": list(run.requests)}
