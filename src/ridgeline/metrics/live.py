"""How the service does now: percentiles, goodput, distance to the hardware's limits, energy, money, the ledger.

Everything here is over the last minutes; what counts for ever is in `metrics.metrics`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.core.events import LateWork
from ridgeline.core.slo import Slo
from ridgeline.metrics.history import READING_S, History, Minute, Reading
from ridgeline.metrics.records import DISCONNECTED, RequestRecord, StepRecord, Totals
from ridgeline.metrics.rows import Rows
from ridgeline.metrics.why import Typical, blame, why
from ridgeline.metrics.window import QUANTILES, Sums, Window

SPAN_S = 300.0
"""Seconds that the live figures cover."""
KEPT_REQUESTS = 4096
LATENCIES = ("ttft", "tpot", "itl", "e2e", "queue", "prefill", "outside")
"""outside: what neither queue nor device explains; itl is counted by the step, the others by the request."""
CHARTED_LATENCIES = ("ttft", "tpot")
CHARTED_FIGURES = ("prompt_tokens_per_second", "output_tokens_per_second", "prefix_hit_rate")
"""What of the latencies and figures a reading keeps."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device can do and what it costs; 0: not known.

    flops, bytes: per second by its specification, at the precision the model computes in. measured_flops,
    measured_bytes: what plain kernels reached on this machine. price: US dollars per hour. power: how joules are
    known: "nvml", "rapl", "estimate" or "". calibration: what predicted step times were fitted to, "" for a guess.
    """

    device: str = ""
    flops: float = 0.0
    bytes: float = 0.0
    measured_flops: float = 0.0
    measured_bytes: float = 0.0
    price: float = 0.0
    power: str = ""
    calibration: str = ""


class Live:
    """Fed by Metrics; read by /metrics, the dashboard, /requests and diagnosis.

    clock: seconds that only grow. wall: unix seconds.
    """

    def __init__(
        self, slo: Slo, clock: Callable[[], float] = time.perf_counter, wall: Callable[[], float] = time.time
    ) -> None:
        self.slo = slo
        self.ceilings = Ceilings()
        self.history = History()
        self._clock, self._wall = clock, wall
        self._windows = {name: Window(SPAN_S) for name in LATENCIES}
        self._error = Window(SPAN_S)
        self._prompt_token = Window(SPAN_S)
        """Seconds from admission to first token, per prompt token computed."""
        self._sums = Sums(SPAN_S)
        self._rows = Rows(KEPT_REQUESTS)
        self._minute_ends: float | None = None
        self._reading_due = 0.0
        self._minute: dict[str, int] = {}
        self.late: list[LateWork] = []
        """All that was compiled and captured while requests waited; each variant of a kernel at most once."""
        self._last: StepRecord | None = None
        self._steps: list[StepRecord] = []
        self._gaps: list[float | None] = []
        self._second_ends = 0.0
        """Until then records only gather."""
        self._n_steps = 0
        self._device_s = self._mixed_s = self._host_s = self._row_s = 0.0

    # --- news -------------------------------------------------------------------------------------------------------

    def on_step(self, step: StepRecord, gap_s: float | None) -> None:
        """A step's record. gap_s: seconds since the last step's tokens, None after a pause.

        This runs in every step, so it only keeps the record; a second's records are added together (`_settle`).
        """
        self._advance(self._clock())
        self._steps.append(step)
        self._gaps.append(gap_s)
        self._last = step
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

    @property
    def totals(self) -> Totals:
        """Everything that steps have added up to so far."""
        return Totals(self._n_steps, self._device_s, self._mixed_s, self._host_s, self._row_s)

    def tick(self) -> None:
        """Let time pass: called every second, so that minutes end and readings are taken while nothing runs, too."""
        self._advance(self._clock())

    def _advance(self, now: float) -> None:
        """The clock says `now`: end the second, and the minute, if they are over."""
        if now >= self._second_ends:
            self._settle()
            self._second_ends = math.floor(now) + 1.0
            self._turn(now)

    def _settle(self) -> None:
        """Add the records of the second that has passed, or of what there is of this one, to the windows."""
        if not self._steps:
            return
        now = self._second_ends - 1.0  # all records came in the second that begins here
        steps, gaps, self._steps, self._gaps = self._steps, self._gaps, [], []
        self._sums.add(now, amounts(steps))
        self._count("prompt_tokens", sum(step.prompt_tokens for step in steps))
        self._count("output_tokens", sum(step.output_tokens for step in steps))
        self._error.extend(
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

    def on_request(self, record: RequestRecord) -> None:
        """A request has ended, however. Goodput judges those that have an SLO; see core.slo for disconnects."""
        now = self._clock()
        self._advance(now)
        self._rows.add(record)
        slo = self.slo_of(record)
        fault = blame(record, slo)
        judged = bool(slo) and bool(fault or record.cut != DISCONNECTED)
        counted = {"requests": 1.0}
        if record.cut:
            counted[f"cut_{record.cut}"] = 1.0
        if judged:
            counted |= {"judged": 1.0, "good": 0.0 if fault else 1.0}
        if judged and fault:
            counted[f"blame_{fault}"] = 1.0
        if self.slo.objectives and not record.cut:
            kept = self.slo.within(record.ttft_s, record.tpot_s, record.e2e_s)
            counted |= {f"within_{place}": 1.0 for place, met in enumerate(kept) if met}
        self._sums.add(now, counted)
        self._count("requests", 1)
        self._count("judged", int(judged))
        self._count("good", int(judged and not fault))
        if record.cut:
            return
        spent = record.spent
        seen = {"ttft": record.ttft_s, "tpot": record.tpot_s, "e2e": record.e2e_s}
        seen |= {"queue": spent.queue_s, "prefill": spent.prefill_s, "outside": record.elsewhere_s}
        for name, value in seen.items():
            if value is not None:
                self._windows[name].add(now, value)
        if (computed := record.prompt_tokens - record.cached_tokens) > 0 and spent.prefill_s > 0:
            self._prompt_token.add(now, spent.prefill_s / computed)

    def slo_of(self, record: RequestRecord) -> Slo:
        """The limits that a request is judged by: its own, then the server's."""
        return self.slo.under(record.declared)

    # --- the ledger -------------------------------------------------------------------------------------------------

    def find(self, name: str) -> RequestRecord | None:
        """The request of a body's id or of an x-request-id (the newest that had it), as long as it is kept."""
        return self._rows.find(name)

    def rows(self, order: str = "recent", limit: int = 20) -> list[RequestRecord]:
        """Ended requests: the latest, or the slowest of those of the last minutes, first."""
        if order == "slowest":
            since = self._wall() - SPAN_S
            late = (row for row in self._rows if row.arrived_at + row.e2e_s >= since)
            return sorted(late, key=lambda row: -row.e2e_s)[:limit]
        return self._rows.recent(limit)

    def why(self, record: RequestRecord) -> dict[str, Any]:
        now = self._clock()
        queue, prefill, tpot = (self._windows[name].quantiles(now, (0.5,))[0] for name in ("queue", "prefill", "tpot"))
        return why(record, self.slo_of(record), Typical(queue, prefill, tpot)) | self.shares(record)

    def shares(self, record: RequestRecord) -> dict[str, float]:
        """A request's part of energy and money, by its part of the device's time; what the device idles belongs to nobody."""
        device_s = record.spent.device_s
        return {
            "joules": device_s * self.figures().get("watts", 0.0),
            "cost": device_s * self.ceilings.price / 3600,
        }

    # --- figures ----------------------------------------------------------------------------------------------------

    def quantiles(self) -> Iterator[tuple[str, float, float]]:
        """(latency, share, seconds) for all that was seen."""
        self._settle()
        now = self._clock()
        for name, window in self._windows.items():
            for share, value in zip(QUANTILES, window.quantiles(now), strict=True):
                if value == value:
                    yield name, share, value

    def latencies(self) -> dict[str, dict[str, float]]:
        """The same by latency and percentile: {"ttft": {"p50": seconds, ...}, ...}."""
        latencies: dict[str, dict[str, float]] = {}
        for name, share, seconds in self.quantiles():
            latencies.setdefault(name, {})[f"p{share * 100:g}"] = seconds
        return latencies

    def now(self) -> dict[str, float]:
        """Requests and shares of the KV cache by the newest step; empty before the first one."""
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
        """The live figures by name; what cannot be known (no SLO, no price, no such hardware) is left out.

        mfu and mbu are shares of the specification while the device was busy, mfu_measured and mbu_measured of what
        plain kernels reach; device_busy is the share of time it was busy at all.
        """
        self._settle()
        now = self._clock()
        sums, seconds, top = self._sums.totals(now), self._sums.seconds(now), self.ceilings
        busy, tokens = sums.get("device_s", 0.0), sums.get("prompt_tokens", 0.0) + sums.get("output_tokens", 0.0)
        found = {
            "prompt_tokens_per_second": sums.get("prompt_tokens", 0.0) / seconds,
            "output_tokens_per_second": sums.get("output_tokens", 0.0) / seconds,
            "requests_per_second": sums.get("requests", 0.0) / seconds,
            "device_busy": min(1.0, busy / seconds),
        }
        if sums.get("prefix_queries"):
            found["prefix_hit_rate"] = sums["prefix_hits"] / sums["prefix_queries"]
        if judged := sums.get("judged"):
            found["goodput_requests_per_second"] = sums["good"] / seconds
            found["slo_attainment"] = sums["good"] / judged
            if self.slo.of_windows:
                found["slo_met"] = 0.0 if self.broken() else 1.0
        if busy:
            found["prompt_share"] = sums["mixed_s"] / busy
            found["bubble"] = sums["idle_s"] / (busy + sums["idle_s"])
            found["host_seconds_per_step"] = sums["host_s"] / max(1.0, sums["steps"])
            found["mean_running"] = sums["row_s"] / busy
            if sums["decode_steps"]:
                found["decode_step_seconds"] = sums["decode_s"] / sums["decode_steps"]
                found["decode_step_bytes"] = sums["decode_bytes"] / sums["decode_steps"]
                found["decode_step_predicted_seconds"] = sums["decode_predicted_s"] / sums["decode_steps"]
            for name, rate, peak in (
                ("mfu", sums["flops"], top.flops),
                ("mbu", sums["bytes"], top.bytes),
                ("mfu_measured", sums["flops"], top.measured_flops),
                ("mbu_measured", sums["bytes"], top.measured_bytes),
            ):
                if peak:
                    found[name] = rate / busy / peak
        if (error := self._error.quantiles(now, (0.5,))[0]) == error:
            found["step_prediction_error"] = error
        output, prompt = (one.quantiles(now, (0.5,))[0] for one in (self._windows["tpot"], self._prompt_token))
        if output / prompt > 0:
            found["input_tokens_per_output_token"] = output / prompt
        if sums.get("joules"):
            found["watts"] = sums["joules"] / seconds
            if tokens:
                found["joules_per_token"] = sums["joules"] / tokens
        if top.price and tokens:
            found["cost_per_million_tokens"] = top.price / 3600 * seconds / tokens * 1e6
            if sums.get("output_tokens"):
                found["cost_per_million_output_tokens"] = top.price / 3600 * seconds / sums["output_tokens"] * 1e6
        return found

    def blamed(self) -> dict[str, int]:
        """Requests of the last minutes by what made them miss the SLO; empty without one."""
        return self._counted("blame_")

    def cut(self) -> dict[str, int]:
        """Requests of the last minutes that were cut off, by `RequestRecord.cut`."""
        return self._counted("cut_")

    def _counted(self, prefix: str) -> dict[str, int]:
        sums = self._sums.totals(self._clock())
        return {name.removeprefix(prefix): int(count) for name, count in sums.items() if name.startswith(prefix)}

    def broken(self) -> tuple[str, ...]:
        """What of the SLO's percentiles and its share the last minutes miss, in words."""
        sums = self._sums.totals(self._clock())
        if not self.slo or not (count := sums.get("judged", 0.0)):
            return ()
        shares = [sums.get(f"within_{place}", 0.0) / count for place in range(len(self.slo.objectives))]
        return self.slo.broken(shares, sums["good"] / count)

    def point(self) -> tuple[float, float] | None:
        """(FLOPs per byte, FLOPs per second) of the last minutes' steps: where the server stands in the roofline."""
        self._settle()
        sums = self._sums.totals(self._clock())
        if not sums.get("bytes") or not sums.get("device_s"):
            return None
        return sums["flops"] / sums["bytes"], sums["flops"] / sums["device_s"]

    @property
    def last(self) -> StepRecord | None:
        """The newest step's record."""
        return self._last

    # --- history ----------------------------------------------------------------------------------------------------

    def _count(self, name: str, more: int) -> None:
        self._minute[name] = self._minute.get(name, 0) + more

    def _turn(self, now: float) -> None:
        """Take the reading that is due, and close the minute that has passed."""
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
        counts = {name: self._minute.get(name, 0) for name in names}
        self._minute = {}
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


def amounts(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Sums over records: what all count, then what only those of a step do, then the steps that computed no prompt."""
    ran = [step for step in steps if step.steps]
    plain = [step for step in ran if not step.prompt_tokens]
    device_s, decode_s = sum(step.device_s for step in ran), sum(step.device_s for step in plain)
    return {
        "prompt_tokens": float(sum(step.prompt_tokens for step in steps)),
        "output_tokens": float(sum(step.output_tokens for step in steps)),
        "prefix_queries": float(sum(step.prefix_queries for step in steps)),
        "prefix_hits": float(sum(step.prefix_hits for step in steps)),
        "joules": sum(step.joules for step in steps),
        "steps": float(sum(step.steps for step in ran)),
        "device_s": device_s,
        "host_s": sum(step.host_s for step in ran),
        "idle_s": sum(step.idle_s for step in ran),
        "flops": sum(step.flops for step in ran),
        "bytes": sum(step.bytes for step in ran),
        "row_s": sum(step.device_s * step.running for step in ran),
        "mixed_s": device_s - decode_s,
        "decode_s": decode_s,
        "decode_steps": float(sum(step.steps for step in plain)),
        "decode_bytes": sum(step.bytes for step in plain),
        "decode_predicted_s": sum(step.predicted_s for step in plain),
    }
