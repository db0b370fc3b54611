"""MFU and MBU of a run: the work that the server counted, or that the model's formulas predict, relative to the hardware's peak
rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ridgeline.bench.figures import spread, throughput
from ridgeline.bench.record import Row, Run
from ridgeline.core.cost import StepWork, step_work
from ridgeline.core.spec import ModelSpec
from ridgeline.hardware.table import Accelerator

COUNTERS = {
    "steps": "ridgeline:steps_total",
    "busy_s": "ridgeline:step_device_seconds_total",
    "flops": "ridgeline:estimated_flops_per_gpu_total",
    "useful_flops": "ridgeline:useful_flops_per_gpu_total",
    "draft_flops": "ridgeline:draft_flops_per_gpu_total",
    "bytes": "ridgeline:estimated_moved_bytes_per_gpu_total",
    "draft_bytes": "ridgeline:draft_moved_bytes_per_gpu_total",
    "joules": "ridgeline:energy_joules_total",
    "prompt_joules": "ridgeline:prompt_energy_joules_total",
    "output_joules": "ridgeline:output_energy_joules_total",
}
"""Ridgeline's counters of its work. A run has their differences in the fact `counted`."""
MEASURED = ", relative to rates measured on that machine, whose specification is unknown"
EXCEEDED = (
    "; steps exceeded these rates, so shares are relative to what steps reached: other processes used the machine when its server "
    "started, or the weights stay in a cache of the processor"
)


@dataclass(frozen=True, slots=True)
class Point:
    """One concurrency of a curve."""

    concurrency: int
    output_tokens_per_s: float
    ttft_s: float
    tpot_s: float
    mfu: float | None
    """Useful FLOP/s over the time of the run, as a share of the peak, as specified or as the note says
    measured. None if the model or the device is unknown."""
    mbu: float | None
    """Bytes of the model moved per second over the time of the run, as a share of the bandwidth, likewise."""
    note: str
    """How work was counted and which peak rates are measured ones, or why MFU and MBU are unknown."""
    mfu_busy: float | None = None
    mbu_busy: float | None = None
    """The same over the time in which steps ran. None if the server does not count it."""
    mfu_executed: float | None = None
    mbu_executed: float | None = None
    """As mfu_busy and mbu_busy, with rejected drafts, tokens computed again and the drafter. None if not counted."""

    @property
    def shares(self) -> tuple[float | None, ...]:
        """Shares of the peaks in the order in which tables show them."""
        return self.mfu, self.mbu, self.mfu_busy, self.mbu_busy, self.mfu_executed


@dataclass(frozen=True, slots=True)
class Limits:
    """The served model and the device it runs on, as far as the options name them."""

    spec: ModelSpec | None = None
    device: Accelerator | None = None
    named: bool = False
    """The device was given with --on. Otherwise it is that of this machine."""


def point(run: Run, limits: Limits) -> Point:
    """Compute a run's point of the curve: from what the server counted, or else from the model's formulas."""
    ttft, tpot = (spread(run, name).percentiles[50].value for name in ("ttft", "tpot"))
    rate = throughput(run)["output_tokens_per_s"]
    concurrency = int(run.facts["concurrency"])
    place = concurrency, rate, ttft, tpot
    counted, seconds = run.facts.get("counted"), max(run.seconds, 1e-9)
    if counted:
        return _counted(place, counted, _peaks(run, limits), seconds)
    if limits.spec is None or limits.device is None:
        return Point(*place, None, None, "MFU and MBU of a server without counters need --model-folder and --on")
    steps = sum(row.output_tokens for row in run.completed) / max(1, concurrency)
    total = work(run, limits.spec, steps)
    flops, bandwidth = limits.device.peak(limits.spec.matrix_dtype), limits.device.bandwidth
    note = f"about {steps:.0f} steps, if each serves all requests; weights and cache as --model-folder stores them"
    if limits.device.measured:
        note += MEASURED
    return Point(*place, total.flops / seconds / flops, total.bytes / seconds / bandwidth, note)


def _counted(
    place: tuple[int, float, float, float],
    counted: Mapping[str, float],
    peaks: tuple[float, float, str],
    seconds: float,
) -> Point:
    """A point from the server's counters. place: the first fields of Point. peaks: see _peaks."""
    if not all(peaks[:2]):
        return Point(*place, None, None, "the peak rates of the server's device are unknown: give one with --on")
    busy = max(counted["busy_s"], 1e-9)
    amounts = counted["flops"] + counted["draft_flops"], counted["bytes"] + counted["draft_bytes"]
    reached = tuple(amount / busy for amount in amounts)
    note = f"{counted['steps']:.0f} steps and their work, as counted by the server{peaks[2]}"
    if peaks[2] and (reached[0] > peaks[0] or reached[1] > peaks[1]):
        peaks, note = (max(peaks[0], reached[0]), max(peaks[1], reached[1]), peaks[2]), note + EXCEEDED
    flops, n_bytes = counted["useful_flops"] / peaks[0], counted["bytes"] / peaks[1]
    executed = amounts[0] / peaks[0], amounts[1] / peaks[1]
    of_busy = flops / busy, n_bytes / busy, *(amount / busy for amount in executed)
    return Point(*place, flops / seconds, n_bytes / seconds, note, *of_busy)


def _peaks(run: Run, limits: Limits) -> tuple[float, float, str]:
    """Peak FLOP/s in the precision of the served model's products, bytes/s, and a note on them: of --on, or of the server's device.

    0: unknown. Rates that the server measured stand in for an unknown specification.
    """
    server = run.facts.get("server") or {}
    facts, ceilings = server.get("facts", {}), server.get("ceilings", {})
    if limits.device is not None and limits.named and "matrix_dtype" in facts:
        return limits.device.peak(facts["matrix_dtype"]), limits.device.bandwidth, ""
    published = ceilings.get("flops", 0.0), ceilings.get("bytes", 0.0)
    measured = ceilings.get("measured_flops", 0.0), ceilings.get("measured_bytes", 0.0)
    flops, n_bytes = (known or here for known, here in zip(published, measured, strict=True))
    return flops, n_bytes, "" if all(published) else MEASURED


def work(run: Run, spec: ModelSpec, steps: float) -> StepWork:
    """Compute the work of the completed requests: operations, weights once per step, keys and values read and written.

    Cached prompt tokens cost no operations.
    """
    tokens = flops = n_bytes = 0
    for row in run.completed:
        request = _request_work(row, spec)
        tokens, flops, n_bytes = tokens + request.tokens, flops + request.flops, n_bytes + request.bytes
    return StepWork(tokens, flops, n_bytes + round(steps * spec.step_weight_bytes))


def _request_work(row: Row, spec: ModelSpec) -> StepWork:
    """Compute one request's work without the bytes of the weights: the prompt in one step, then one token a step."""
    prompt, n_decode = row.input_tokens, max(0, row.output_tokens - 1)
    cached = min(row.cached_tokens, max(0, prompt - 1))
    parts = step_work(spec, [(cached, prompt - cached)]), step_work(spec, [(prompt, n_decode)], n_decode)
    weights = sum(spec.step_weight_bytes for part in parts if part.tokens)
    # `step_work` reads the cache once for the whole answer. In fact each token reads it, half of the answer long on average.
    one_read, mean_read = spec.kv_read_bytes(prompt, n_decode), spec.kv_read_bytes(prompt + n_decode // 2, 1)
    tokens, flops, n_bytes = (sum(column) for column in zip(*(part[:3] for part in parts), strict=True))
    return StepWork(tokens, flops, n_bytes - weights - one_read + n_decode * mean_read)


def metric(text: bytes, name: str) -> float | None:
    """Sum a metric over its labels in Prometheus text. None if the text does not contain it."""
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in text.decode(errors="replace").splitlines()
        if line.startswith((f"{name}{{", f"{name} "))
    ]
    return sum(values) if values else None
