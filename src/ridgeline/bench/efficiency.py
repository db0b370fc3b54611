"""MFU and MBU of a run: the work that the model's formulas predict, relative to the hardware's peak rates."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.bench.figures import spread, throughput
from ridgeline.bench.record import Row, Run
from ridgeline.core.cost import StepWork, step_work
from ridgeline.core.spec import ModelSpec
from ridgeline.hardware.table import Accelerator

STEPS = "ridgeline:steps_total"
"""Ridgeline's counter of steps. Without it, each step is assumed to serve all concurrent requests."""


@dataclass(frozen=True, slots=True)
class Point:
    """One concurrency of a curve."""

    concurrency: int
    output_tokens_per_s: float
    ttft_s: float
    tpot_s: float
    mfu: float | None
    """Share of the peak FLOP rate, as specified or as the note says measured. None if the model or the device is unknown."""
    mbu: float | None
    """Share of the memory bandwidth, specified or measured likewise."""
    note: str
    """How steps were counted and which peak rates are measured ones, or why MFU and MBU are unknown."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The served model and the device it runs on."""

    spec: ModelSpec
    device: Accelerator


def point(run: Run, limits: Limits | None, steps: float | None) -> Point:
    """Compute a run's point of the curve. steps: steps that the server counted during the run, None if unknown."""
    ttft, tpot = (spread(run, name).percentiles[50].value for name in ("ttft", "tpot"))
    rate = throughput(run)["output_tokens_per_s"]
    concurrency = int(run.facts["concurrency"])
    if limits is None:
        note = "MFU and MBU need --model-folder and --on"
        return Point(concurrency, rate, ttft, tpot, None, None, note)
    if steps:
        note = f"{steps:.0f} steps, as counted by the server"
    else:
        steps = sum(row.output_tokens for row in run.completed) / max(1, concurrency)
        note = f"about {steps:.0f} steps, if each serves all requests"
    if limits.device.measured:
        note += ", relative to rates measured on this machine, whose specification is unknown"
    total = work(run, limits.spec, steps)
    peak_flops = limits.device.peak(limits.spec.matrix_dtype)
    seconds = max(run.seconds, 1e-9)
    return Point(
        concurrency,
        rate,
        ttft,
        tpot,
        total.flops / seconds / peak_flops,
        total.bytes / seconds / limits.device.bandwidth,
        note,
    )


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
