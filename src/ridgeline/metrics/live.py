"""Live figures of the last minutes: percentiles, goodput, MFU and MBU, energy, cost, and the ledger of requests.

Counters since the start are in `metrics.metrics`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from ridgeline.core.events import LateWork
from ridgeline.core.slo import Slo
from ridgeline.core.token_prices import TokenPrices
from ridgeline.metrics.agent_runs import AgentRuns
from ridgeline.metrics.history import READING_S, History, Minute, Reading
from ridgeline.metrics.records import DISCONNECTED, RequestRecord, StepRecord, Totals
from ridgeline.metrics.request_index import RequestIndex
from ridgeline.metrics.why import Typical, blame, why
from ridgeline.metrics.window import QUANTILES, Sums, Window

SPAN_S = 300.0
"""Seconds that the live figures cover."""
KEPT_REQUESTS = 4096
KEPT_BATCH_ROWS = 1024
"""Rows of batches that are kept, apart from online requests, which they would push out."""
LATENCIES = ("ttft", "publish", "tpot", "itl", "e2e", "queue", "prefill", "outside")
"""outside: time that neither queue nor device explains. itl is observed once per step, the others once per request."""
SPEED_SHARES = (0.01, 0.05, 0.5, 0.95, 0.99)
"""Quantiles of per-user speed. The low ones are the slowest users."""
CHARTED_LATENCIES = ("ttft", "publish", "tpot")
CHARTED_FIGURES = ("prompt_tokens_per_second", "output_tokens_per_second", "prefix_hit_rate")
"""Latencies and figures that a reading keeps."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Peak rates and price of the device. 0: unknown."""

    device: str = ""
    flops: float = 0.0
    """FLOP/s by the specification, at the model's compute precision."""
    bytes: float = 0.0
    """Bytes per second by the specification."""
    measured_flops: float = 0.0
    """FLOP/s of a matrix product measured on this machine."""
    measured_bytes: float = 0.0
    """Read bandwidth measured on this machine, bytes per second. Steps exceed it if others used the machine then."""
    price: float = 0.0
    """US dollars per hour."""
    power: str = ""
    """Source of joules: "nvml", "rapl", "estimate" or ""."""
    calibration: str = ""
    """Calibration that predicted step times use, or "" for uncalibrated predictions."""


_ADDED = (
    "flops", "bytes", "useful_flops", "draft_flops", "draft_bytes", "saved_s", "prompt_joules", "output_joules",
    "metered_s",
)  # fmt: skip
"""Fields of the records of run steps that are only added up."""


class Live:
    """Live figures of one engine. Metrics writes to it; /metrics, the dashboard, /requests and the diagnosis read it."""

    def __init__(
        self, slo: Slo, clock: Callable[[], float] = time.perf_counter, wall: Callable[[], float] = time.time
    ) -> None:
        """clock: monotonic seconds. wall: unix seconds."""
        self.slo = slo
        self.ceilings = Ceilings()
        self.token_prices = TokenPrices()
        self.history = History()
        self._clock, self._wall = clock, wall
        self._windows = {name: Window(SPAN_S) for name in LATENCIES}
        self._speed = Window(SPAN_S)
        """Output tokens per second that one user sees, 1 / TPOT, once per request."""
        self.agent_runs = AgentRuns(SPAN_S, lambda: self._sums.add(self._clock(), {"agent_runs": 1.0}))
        self._prediction_error = Window(SPAN_S)
        self._prompt_token_s = Window(SPAN_S)
        """Seconds from admission to the first token, per computed prompt token."""
        self._sums = Sums(SPAN_S)
        self._requests = RequestIndex(KEPT_REQUESTS)
        self._batch_rows = RequestIndex(KEPT_BATCH_ROWS)
        self._minute_ends: float | None = None
        self._reading_due = 0.0
        self._minute_counts: dict[str, int] = {}
        self.late: list[LateWork] = []
        """Kernels compiled and graphs captured while requests waited, each kernel variant at most once."""
        self._last: StepRecord | None = None
        self._steps: list[StepRecord] = []
        self._gaps: list[float | None] = []
        self._second_ends = 0.0
        """Until this time, records are only collected."""
        self.verdicts = 0, 0
        """Online requests so far that met their SLO, and that did not."""
        self.token_gaps = 0, 0.0
        """Steps that followed another one without a pause, and the seconds between them: what requests wait for a token."""
        self._n_steps = 0
        self._device_s = self._mixed_s = self._host_s = self._row_s = self._step_joules = self._metered_s = 0.0

    # --- updates ----------------------------------------------------------------------------------------------------

    def on_step(self, step: StepRecord, gap_s: float | None) -> None:
        """A step's record. gap_s: seconds since the last step's tokens, None after a pause.

        This runs in every step, so it only keeps the record; a second's records are added together (`_settle`).
        """
        self._advance(self._clock())
        self._steps.append(step)
        self._gaps.append(gap_s)
        self._last = step
        if gap_s is not None:
            gaps, seconds = self.token_gaps
            self.token_gaps = gaps + 1, seconds + gap_s
        if step.late:
            self.late += step.late
        if step.steps:
            device_s = step.device_s
            self._n_steps += step.steps
            self._host_s += step.host_s
            self._device_s += device_s
            self._row_s += device_s * step.running
            if step.prompt_tokens:
                self._mixed_s += device_s
            if step.metered_s:
                self._step_joules += step.prompt_joules + step.output_joules
                self._metered_s += step.metered_s

    @property
    def totals(self) -> Totals:
        """Sums over all steps so far."""
        times = self._device_s, self._mixed_s, self._host_s, self._row_s
        return Totals(self._n_steps, *times, self._step_joules, self._metered_s)

    def tick(self) -> None:
        """Advance the clock. Called every second, so that minutes and readings are recorded while nothing runs."""
        self._advance(self._clock())

    def _advance(self, now: float) -> None:
        """Close the current second and minute if they are over at `now`."""
        if now >= self._second_ends:
            self._flush()
            self._second_ends = math.floor(now) + 1.0
            self.agent_runs.tick(now)
            self._record_history(now)

    def _flush(self) -> None:
        """Add the collected records to the windows."""
        if not self._steps:
            return
        now = self._second_ends - 1.0  # all records belong to the second that begins here
        steps, gaps, self._steps, self._gaps = self._steps, self._gaps, [], []
        self._sums.add(now, amounts(steps))
        self._count("prompt_tokens", sum(step.prompt_tokens for step in steps))
        self._count("output_tokens", sum(step.output_tokens for step in steps))
        self._prediction_error.extend(
            now,
            [
                (abs(step.predicted_s - step.device_s) / step.device_s, 1)
                for step in steps
                if step.steps and step.predicted_s and step.device_s
            ],
        )
        timed = zip(gaps, steps, strict=True)
        self._windows["itl"].extend(
            now, [(gap, step.output_tokens) for gap, step in timed if gap is not None and step.output_tokens]
        )

    def on_arrival(self) -> None:
        """Count a valid request that arrived, before it is admitted or refused."""
        self._sums.add(self._clock(), {"arrived": 1.0})

    def on_call(self, run_id: str, arrived_at: float) -> None:
        """A request goes to the engine. run_id: its agent run, or "". arrived_at: unix seconds."""
        if run_id:
            self.agent_runs.begin_call(self._clock(), run_id, arrived_at)

    def on_request(self, record: RequestRecord) -> None:
        """Add an ended request. Goodput judges requests that have an SLO; core.slo defines how disconnects count."""
        now = self._clock()
        self._advance(now)
        if record.batch:
            self._batch_rows.add(record)
            return
        self._requests.add(record)
        slo = self.slo_of(record)
        cause = blame(record, slo)
        judged = bool(slo) and bool(cause or record.cut != DISCONNECTED)
        if record.run_id:
            self.agent_runs.end_call(now, record, self.shares(record))
        events = {"requests": 1.0, f"cut_{record.cut}" if record.cut else "completed": 1.0}
        if judged:
            events |= {"judged": 1.0, "good": 0.0 if cause else 1.0}
        if judged and cause:
            events[f"blame_{cause}"] = 1.0
        if self.slo.objectives and not record.cut:
            objectives_met = self.slo.within(record.latencies)
            events |= {f"within_{index}": 1.0 for index, met in enumerate(objectives_met) if met}
        self._sums.add(now, events)
        self._count("requests", 1)
        if judged:
            good, missed = self.verdicts
            self.verdicts = (good, missed + 1) if cause else (good + 1, missed)
        self._count("judged", int(judged))
        self._count("good", int(judged and not cause))
        if record.cut:
            return
        spent = record.spent
        latencies = record.latencies._asdict()
        latencies |= {"queue": spent.queue_s, "prefill": spent.prefill_s, "outside": record.elsewhere_s}
        for name, value in latencies.items():
            if value is not None:
                self._windows[name].add(now, value)
        if record.tpot_s:
            self._speed.add(now, 1 / record.tpot_s)
        if (computed := record.prompt_tokens - record.cached_tokens) > 0 and spent.prefill_s > 0:
            self._prompt_token_s.add(now, spent.prefill_s / computed)

    def slo_of(self, record: RequestRecord) -> Slo:
        """Return the request's limits: its own ones, and the server's for the others."""
        return self.slo.under(record.declared)

    # --- the ledger -------------------------------------------------------------------------------------------------

    def find(self, request_id: str) -> RequestRecord | None:
        """Find a kept request by the id of its answer or by x-request-id (the newest one)."""
        return self._requests.find(request_id) or self._batch_rows.find(request_id)

    def rows(self, order: str = "recent", limit: int = 20) -> list[RequestRecord]:
        """Return ended online requests: the latest first, or with order "slowest" the slowest of the last minutes first. With order
        "batch": the latest rows of batches."""
        if order == "batch":
            return self._batch_rows.recent(limit)
        if order == "slowest":
            since = self._wall() - SPAN_S
            recent = (record for record in self._requests if record.arrived_at + record.e2e_s >= since)
            return sorted(recent, key=lambda record: -record.e2e_s)[:limit]
        return self._requests.recent(limit)

    def why(self, record: RequestRecord) -> dict[str, Any]:
        now = self._clock()
        queue, prefill, tpot = (self._windows[name].quantiles(now, (0.5,))[0] for name in ("queue", "prefill", "tpot"))
        return why(record, self.slo_of(record), Typical(queue, prefill, tpot)) | self.shares(record)

    def bill(self, record: RequestRecord, factor: float) -> dict[str, Any]:
        """What a request is billed by the prices of tokens. factor: of the dollars."""
        return self.token_prices.bill(record.billable, factor)

    def shares(self, record: RequestRecord) -> dict[str, float]:
        """Return a request's energy and cost by its share of device time. Idle time is charged to no request.

        Energy is device time times the power while steps ran: until the first token that of the request's prefill, then that of its
        decoding, and that of the last minutes for a request too short for a reading.
        """
        spent, usual = record.spent, self.figures().get("busy_watts", 0.0)
        watts = (totals.watts if totals.metered_s else usual for totals in (record.prefilling, record.decoding))
        seconds = spent.prompt_device_s, spent.device_s - spent.prompt_device_s
        prompt_joules, output_joules = (power * device_s for power, device_s in zip(watts, seconds, strict=True))
        return {
            "joules": prompt_joules + output_joules,
            "prompt_joules": prompt_joules,
            "output_joules": output_joules,
            "cost": self.cost(record),
        }

    def cost(self, record: RequestRecord) -> float:
        """USD of a request's share of device time."""
        return record.spent.device_s * self.ceilings.price / 3600

    # --- figures ----------------------------------------------------------------------------------------------------

    def quantiles(self) -> Iterator[tuple[str, float, float]]:
        """Yield (latency, quantile, seconds) for every latency that has data."""
        self._flush()
        now = self._clock()
        for name, window in self._windows.items():
            for share, value in zip(QUANTILES, window.quantiles(now), strict=True):
                if value == value:
                    yield name, share, value

    def latencies(self) -> dict[str, dict[str, float]]:
        """Return the quantiles by latency and percentile: {"ttft": {"p50": seconds, ...}, ...}."""
        latencies: dict[str, dict[str, float]] = {}
        for name, share, seconds in self.quantiles():
            latencies.setdefault(name, {})[f"p{share * 100:g}"] = seconds
        return latencies

    def speeds(self) -> dict[float, float]:
        """Return output tokens per second seen by one user, by quantile. Empty without data."""
        quantiles = zip(SPEED_SHARES, self._speed.quantiles(self._clock(), SPEED_SHARES), strict=True)
        return {share: speed for share, speed in quantiles if speed == speed}

    def runs(self) -> dict[str, dict[str, float]]:
        """Return quantiles of the agent runs that ended in the last minutes, by measure and percentile."""
        return self.agent_runs.percentiles(self._clock())

    def now(self) -> dict[str, float]:
        """Return requests and KV cache shares of the newest step. Empty before the first step."""
        step = self._last
        if step is None:
            return {}
        blocks = max(1, step.blocks_total)
        return {
            "running": step.running,
            "waiting": step.waiting,
            "kv_used": step.blocks_used / blocks,
            "kv_cached": step.blocks_cached / blocks,
            "kv_waste_inside": step.waste_inside,
        }

    def figures(self) -> dict[str, float]:
        """Return the live figures by name. Unknown ones (no SLO, no price, unknown hardware) are left out.

        mfu and mbu are relative to the specification, mfu_measured and mbu_measured to the rates measured on this machine. They
        count useful FLOPs and the model's bytes in busy time only. mfu_wall_clock and mbu_wall_clock count all time. mfu_executed
        and mbu_executed count all work in busy time, with the drafter's. device_busy is the share of time in which a step ran.
        """
        self._flush()
        now = self._clock()
        sums, seconds, peaks = self._sums.totals(now), self._sums.seconds(now), self.ceilings
        busy, tokens = sums.get("device_s", 0.0), sums.get("prompt_tokens", 0.0) + sums.get("output_tokens", 0.0)
        figures = {
            "prompt_tokens_per_second": sums.get("prompt_tokens", 0.0) / seconds,
            "output_tokens_per_second": sums.get("output_tokens", 0.0) / seconds,
            "requests_per_second": sums.get("requests", 0.0) / seconds,
            "arriving_requests_per_minute": 60 * sums.get("arrived", 0.0) / seconds,
            "completed_requests_per_minute": 60 * sums.get("completed", 0.0) / seconds,
            "device_busy": min(1.0, busy / seconds),
            **self._run_figures(sums, seconds),
        }
        if sums.get("prefix_queries"):
            figures["prefix_hit_rate"] = sums["prefix_hits"] / sums["prefix_queries"]
        if judged := sums.get("judged"):
            figures["goodput_requests_per_second"] = sums["good"] / seconds
            figures["slo_attainment"] = sums["good"] / judged
            if self.slo.of_windows:
                figures["slo_met"] = 0.0 if self.broken() else 1.0
        if busy:
            figures["prompt_share"] = sums["mixed_s"] / busy
            figures["bubble"] = sums["idle_s"] / (busy + sums["idle_s"])
            figures["host_seconds_per_step"] = sums["host_s"] / max(1.0, sums["steps"])
            figures["mean_running"] = sums["row_s"] / busy
            figures["mean_kv_used"] = sums["kv_s"] / busy
            if sums["saved_s"] or sums["draft_flops"]:
                drafter = sums["draft_flops"] / max(1.0, sums["flops"] + sums["draft_flops"])
                figures["draft_saved_share"] = (sums["saved_s"] - drafter * sums["mixed_s"]) / busy
            if prompt_steps := sums["steps"] - sums["decode_steps"]:
                figures["prompt_step_seconds"] = sums["mixed_s"] / prompt_steps
                figures["prompt_step_predicted_seconds"] = (
                    sums["predicted_s"] - sums["decode_predicted_s"]
                ) / prompt_steps
            if sums["decode_steps"]:
                figures["decode_step_seconds"] = sums["decode_s"] / sums["decode_steps"]
                figures["decode_step_bytes"] = sums["decode_bytes"] / sums["decode_steps"]
                figures["decode_step_predicted_seconds"] = sums["decode_predicted_s"] / sums["decode_steps"]
            figures |= _utilization(sums, seconds, peaks)
        if (error := self._prediction_error.quantiles(now, (0.5,))[0]) == error:
            figures["step_prediction_error"] = error
        output, prompt = (window.quantiles(now, (0.5,))[0] for window in (self._windows["tpot"], self._prompt_token_s))
        if output / prompt > 0:
            figures["input_tokens_per_output_token"] = output / prompt
        figures |= _energy(sums, seconds)
        if peaks.price and tokens:
            figures["cost_per_million_tokens"] = peaks.price / 3600 * seconds / tokens * 1e6
            if sums.get("output_tokens"):
                figures["cost_per_million_output_tokens"] = peaks.price / 3600 * seconds / sums["output_tokens"] * 1e6
        return figures

    def _run_figures(self, sums: Mapping[str, float], seconds: float) -> dict[str, float]:
        """Return the figures of agent runs. Empty without runs."""
        n_open, n_ended = self.agent_runs.count_open(), sums.get("agent_runs", 0.0)
        return {"open_agent_runs": n_open, "agent_runs_per_minute": 60 * n_ended / seconds} if n_open or n_ended else {}

    def blamed(self) -> dict[str, int]:
        """Count the requests of the last minutes by the cause of their SLO miss. Empty without an SLO."""
        return self._counts_of("blame_")

    def cut(self) -> dict[str, int]:
        """Count the requests of the last minutes that were cut off, by `RequestRecord.cut`."""
        return self._counts_of("cut_")

    def _counts_of(self, prefix: str) -> dict[str, int]:
        sums = self._sums.totals(self._clock())
        return {name.removeprefix(prefix): int(count) for name, count in sums.items() if name.startswith(prefix)}

    def broken(self) -> tuple[str, ...]:
        """Describe the percentiles and the share of the SLO that the last minutes miss."""
        sums = self._sums.totals(self._clock())
        if not self.slo or not (count := sums.get("judged", 0.0)):
            return ()
        shares = [sums.get(f"within_{index}", 0.0) / count for index in range(len(self.slo.objectives))]
        return self.slo.broken(shares, sums["good"] / count)

    def point(self) -> tuple[float, float] | None:
        """Return the server's point in the roofline, (FLOPs per byte, FLOP/s), over the last minutes' steps."""
        self._flush()
        sums = self._sums.totals(self._clock())
        if not sums.get("bytes") or not sums.get("device_s"):
            return None
        flops, n_bytes = sums["flops"] + sums["draft_flops"], sums["bytes"] + sums["draft_bytes"]
        return flops / n_bytes, flops / sums["device_s"]

    @property
    def last(self) -> StepRecord | None:
        """The record of the newest step."""
        return self._last

    # --- history ----------------------------------------------------------------------------------------------------

    def _count(self, name: str, count: int) -> None:
        self._minute_counts[name] = self._minute_counts.get(name, 0) + count

    def _record_history(self, now: float) -> None:
        """Record a reading and a minute if they are due."""
        if now >= self._reading_due:
            self._reading_due = now + READING_S
            self.history.readings.append(self._reading())
        if self._minute_ends is None:
            self._minute_ends = now + 60.0
        if now < self._minute_ends:
            return
        self._minute_ends = now + 60.0
        quantiles = {f"{name}_p{share * 100:g}": value for name, share, value in self.quantiles()}
        names = ("requests", "judged", "good", "prompt_tokens", "output_tokens")
        counts = {name: self._minute_counts.get(name, 0) for name in names}
        self._minute_counts = {}
        self.history.minutes.append(Minute(self._wall(), quantiles, **counts))

    def _reading(self) -> Reading:
        latencies, figures = self.latencies(), self.figures()
        return Reading(
            self._wall(),
            {name: latencies[name] for name in CHARTED_LATENCIES if name in latencies},
            {name: figures[name] for name in CHARTED_FIGURES if name in figures},
            self.now(),
            self.point(),
        )


def _utilization(sums: Mapping[str, float], seconds: float, peaks: Ceilings) -> dict[str, float]:
    """MFU and MBU over all time, then over busy time; see Live.figures. Left out where the peak is unknown."""
    flops, n_bytes, busy = sums["useful_flops"], sums["bytes"], sums["device_s"]
    parts = (
        ("mfu_wall_clock", flops, peaks.flops, seconds),
        ("mbu_wall_clock", n_bytes, peaks.bytes, seconds),
        ("mfu", flops, peaks.flops, busy),
        ("mbu", n_bytes, peaks.bytes, busy),
        ("mfu_executed", sums["flops"] + sums["draft_flops"], peaks.flops, busy),
        ("mbu_executed", n_bytes + sums["draft_bytes"], peaks.bytes, busy),
        ("mfu_measured", flops, peaks.measured_flops and max(peaks.measured_flops, flops / busy), busy),
        ("mbu_measured", n_bytes, peaks.measured_bytes and max(peaks.measured_bytes, n_bytes / busy), busy),
    )
    return {name: amount / time_s / peak for name, amount, peak, time_s in parts if peak}


def _energy(sums: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Power and energy per token. Left out where no energy was read."""
    joules, figures = sums.get("joules", 0.0), {}
    if joules:
        figures["watts"] = joules / seconds
        if tokens := sums["prompt_tokens"] + sums["output_tokens"]:
            figures["joules_per_token"] = joules / tokens
    if sums.get("metered_s"):
        figures["busy_watts"] = (sums["prompt_joules"] + sums["output_joules"]) / sums["metered_s"]
        for name in ("prompt", "output"):
            if sums[f"{name}_tokens"]:
                figures[f"joules_per_{name}_token"] = sums[f"{name}_joules"] / sums[f"{name}_tokens"]
    return figures


def amounts(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Sum records: counts of all records, then of records of a run step, then of steps without prompt tokens (decode_*)."""
    run_steps = [step for step in steps if step.steps]
    decode_steps = [step for step in run_steps if not step.prompt_tokens]
    device_s, decode_s = sum(step.device_s for step in run_steps), sum(step.device_s for step in decode_steps)
    return {
        "prompt_tokens": float(sum(step.prompt_tokens for step in steps)),
        "output_tokens": float(sum(step.output_tokens for step in steps)),
        "prefix_queries": float(sum(step.prefix_queries for step in steps)),
        "prefix_hits": float(sum(step.prefix_hits for step in steps)),
        "joules": sum(step.joules for step in steps),
        "steps": float(sum(step.steps for step in run_steps)),
        "device_s": device_s,
        "host_s": sum(step.host_s for step in run_steps),
        "idle_s": sum(step.idle_s for step in run_steps),
        **{name: sum(map(attrgetter(name), run_steps)) for name in _ADDED},
        "row_s": sum(step.device_s * step.running for step in run_steps),
        "kv_s": sum(step.device_s * step.blocks_used / max(1, step.blocks_total) for step in run_steps),
        "mixed_s": device_s - decode_s,
        "decode_s": decode_s,
        "decode_steps": float(sum(step.steps for step in decode_steps)),
        "decode_bytes": sum(step.bytes for step in decode_steps),
        "predicted_s": sum(step.predicted_s for step in run_steps),
        "decode_predicted_s": sum(step.predicted_s for step in decode_steps),
    }
