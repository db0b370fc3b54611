"""How far from the hardware's limits a run was: MFU and MBU from what the model's formulas say had to be done."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.bench.figures import spread, throughput
from ridgeline.bench.record import Row, Run
from ridgeline.core.cost import StepWork, step_work
from ridgeline.core.spec import ModelSpec
from ridgeline.hardware.table import Accelerator

STEPS = "ridgeline:steps_total"
"""Our server's count of steps; without it each step is taken to serve everybody who is there."""


@dataclass(frozen=True, slots=True)
class Point:
    """One concurrency of a curve. mfu, mbu: shares of the specified peaks; None where the model or the device is not known.

    note: how steps were counted, or why there are no shares.
    """

    concurrency: int
    output_tokens_per_s: float
    ttft_s: float
    tpot_s: float
    mfu: float | None
    mbu: float | None
    note: str


@dataclass(frozen=True, slots=True)
class Limits:
    """The served model and the device it runs on."""

    spec: ModelSpec
    device: Accelerator


def point(run: Run, limits: Limits | None, steps: float | None) -> Point:
    """A run as a point of the curve. steps: how many the server counted during the run, None where it does not say."""
    first, each = (spread(run, name).percentiles[50].value for name in ("ttft", "tpot"))
    rate = throughput(run)["output_tokens_per_s"]
    concurrency = int(run.facts["concurrency"])
    if limits is None:
        note = "MFU and MBU need --model-folder and --on"
        return Point(concurrency, rate, first, each, None, None, note)
    if steps:
        note = f"{steps:.0f} steps, as counted by the server"
    else:
        steps = sum(row.output_tokens for row in run.completed) / max(1, concurrency)
        note = f"about {steps:.0f} steps, if each serves all requests"
    done = work(run, limits.spec, steps)
    flops = limits.device.peak(limits.spec.dtype)
    seconds = max(run.seconds, 1e-9)
    return Point(
        concurrency,
        rate,
        first,
        each,
        done.flops / seconds / flops,
        done.bytes / seconds / limits.device.bandwidth,
        note,
    )


def work(run: Run, spec: ModelSpec, steps: float) -> StepWork:
    """What had to be done for the completed requests: their operations, the weights once per step, keys and values as
    they were read and written. Cached prompt tokens were not computed."""
    tokens = flops = moved = 0
    for row in run.completed:
        one = _request(row, spec)
        tokens, flops, moved = tokens + one.tokens, flops + one.flops, moved + one.bytes
    return StepWork(tokens, flops, moved + round(steps * spec.step_weight_bytes))


def _request(row: Row, spec: ModelSpec) -> StepWork:
    """One request's work without the weights' bytes: its prompt in one piece, then token by token."""
    prompt, after = row.input_tokens, max(0, row.output_tokens - 1)
    cached = min(row.cached_tokens, max(0, prompt - 1))
    parts = step_work(spec, [(cached, prompt - cached)]), step_work(spec, [(prompt, after)], after)
    weights = sum(spec.step_weight_bytes for one in parts if one.tokens)
    # As one piece the answer would read the cache once; token by token it is read each time, half full on average.
    once, each = spec.kv_read_bytes(prompt, after), spec.kv_read_bytes(prompt + after // 2, 1)
    tokens, flops, moved = (sum(column) for column in zip(*(one[:3] for one in parts), strict=True))
    return StepWork(tokens, flops, moved - weights - once + after * each)


def metric(text: bytes, name: str) -> float | None:
    """Sum of a metric over its labels in Prometheus's text, None where it is not there."""
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in text.decode(errors="replace").splitlines()
        if line.startswith((f"{name}{{", f"{name} "))
    ]
    return sum(values) if values else None
