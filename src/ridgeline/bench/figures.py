"""From rows to figures: what run.json says, what the table shows, and whether the run means anything.

Latencies count from the scheduled time. The top level of run.json has the keys that readers of `vllm bench serve` know.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from ridgeline.bench.record import Row, Run
from ridgeline.bench.sample import SHARES, Array, Figure, figure, mean, percentile, token_percentiles

LAG_FLOOR_S = 0.010
LAG_SHARE = 0.05
CPU_LIMIT = 0.9
"""A run is the client's and not the server's when the p99 of its lag exceeds the greater of LAG_FLOOR_S and LAG_SHARE of
the median TTFT, or when this process was busy for more than CPU_LIMIT of the time."""

READER_S = 0.12
"""What a fast reader takes for a token."""
LATENCIES: Mapping[str, str] = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "time between tokens",
    "chunk": "time between chunks",
    "e2e": "end to end",
}
_VLLM = {"ttft": "ttft", "tpot": "tpot", "chunk": "itl", "e2e": "e2el"}
"""Their name of our latency: what vLLM calls ITL is the time between chunks, whatever they hold."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A latency over its requests (or tokens), in seconds, with intervals."""

    mean: Figure
    percentiles: Mapping[int, Figure]
    std: float
    count: int


def digits(value: float) -> str:
    """Four digits, never in powers of ten: 12.34, 123.4, 12345."""
    return "-" if math.isnan(value) else f"{value:.0f}" if abs(value) >= 9999.5 else f"{value:.4g}"


def latency(rows: Sequence[Row], name: str) -> Array:
    """One latency of every completed request that has it, in seconds."""
    found = (getattr(row, f"{name}_s") for row in rows if not row.error)
    return np.array([value for value in found if value is not None], dtype=float)


def spread(run: Run, name: str) -> Spread:
    """A latency of LATENCIES with its percentiles. itl weighs by token: a gap that brought k tokens is k times a k-th."""
    rows = run.completed
    if name in ("itl", "chunk"):
        return _gap_spread(rows, by_token=name == "itl")
    values = latency(rows, name)
    shares = {share: figure(values, percentile(share)) for share in SHARES}
    return Spread(figure(values, mean), shares, float(values.std()) if len(values) else math.nan, len(values))


def _gap_spread(rows: Sequence[Row], *, by_token: bool) -> Spread:
    values, weights = [], []
    for row in rows:
        gaps, counts = np.array(row.gaps_s, dtype=float), np.array(row.counts[1:], dtype=float)
        if not len(gaps):
            continue
        weights.append(counts if by_token else np.ones(len(gaps)))
        values.append(gaps / np.maximum(counts, 1) if by_token else gaps)
    shares = dict(zip(SHARES, token_percentiles(values, weights), strict=True))
    if not values:
        return Spread(Figure(math.nan, math.nan, math.nan), shares, math.nan, 0)
    pooled, heavy = np.concatenate(values), np.concatenate(weights)
    if not heavy.sum():
        heavy = np.ones(len(pooled))
    center = float(np.average(pooled, weights=heavy))
    width = math.sqrt(float(np.average((pooled - center) ** 2, weights=heavy)))
    # Requests are the independent draws here too: the mean of their means has the interval.
    means = np.array(
        [np.average(one, weights=weight) for one, weight in zip(values, weights, strict=True) if weight.sum()]
    )
    around = figure(means, mean)
    shift = center - around.value
    return Spread(Figure(center, around.low + shift, around.high + shift), shares, width, len(pooled))


def late_for_reader(rows: Sequence[Row]) -> float:
    """Share of tokens that came after a reader wanted them, who begins with the first and reads one each READER_S."""
    late = total = 0
    for row in rows:
        passed, read = 0.0, sum(row.counts[:1])
        total += sum(row.counts)
        for gap, count in zip(row.gaps_s, row.counts[1:], strict=True):
            passed += gap
            # Of tokens read .. read + count - 1, those are late whose turn was before now.
            late += max(0, min(count, math.ceil(passed / READER_S - 1e-9) - read))
            read += count
    return late / total if total else math.nan


STEADY = 3.0
"""Median answers that arrivals must last for before a rate says what a server sustains."""


def trouble(run: Run) -> str:
    """Why a run must not be believed: the load generator was its bottleneck. "" for a valid one."""
    ttft = latency(run.rows, "ttft")
    limit = max(LAG_FLOOR_S, LAG_SHARE * float(np.median(ttft))) if len(ttft) else LAG_FLOOR_S
    send, loop = lag_p99(run)
    for what, lag in (("requests were sent", send), ("the event loop ran", loop)):
        if lag > limit:
            rule = f"more than {limit * 1e3:.1f} ms, the greater of 10 ms and 5 % of the median TTFT"
            return f"{what} {lag * 1e3:.1f} ms late (p99), {rule}: the client is the bottleneck"
    if cpu_share(run) > CPU_LIMIT:
        return f"the client was busy for {cpu_share(run):.0%} of the time: it is the bottleneck"
    return ""


def lag_p99(run: Run) -> tuple[float, float]:
    """Seconds by which requests left late, and by which the event loop ran late, 99th percentiles."""
    send = np.array([row.lag_s for row in run.rows])
    loop = np.array(run.loop_lag_s)
    return tuple(float(np.percentile(one, 99)) if len(one) else 0.0 for one in (send, loop))  # type: ignore[return-value]


def cpu_share(run: Run) -> float:
    """Share of one core that this process used."""
    return run.cpu_s / run.seconds if run.seconds > 0 else 0.0


def kept_up(run: Run) -> float:
    """Rate of completions over rate of arrivals, each between its 10th and 90th percentile: 1 for a server that keeps up,
    less when its queue only grows."""
    ends = np.array([row.ended_s for row in run.completed])
    due = np.array([row.scheduled_s for row in run.rows])
    if len(ends) < 10:
        return math.nan
    arrived, done = (float(np.subtract(*np.percentile(one, [90, 10]))) for one in (due, ends))
    return arrived / done * len(ends) / len(due) if done > 0 else math.nan


def brief(run: Run) -> str:
    """Why a run's rate was no steady state: its arrivals lasted for less than STEADY median answers. "" for one that was."""
    due = [row.scheduled_s for row in run.rows]
    answers = latency(run.rows, "e2e")
    if len(due) < 2 or not len(answers) or math.isinf(run.facts.get("rate") or math.inf):
        return ""
    span, answer = max(due) - min(due), float(np.median(answers))
    if span >= STEADY * answer:
        return ""
    return (
        f"all requests arrived within {span:.3g} s, and the median answer took {answer:.3g} s: the run is too short to show a "
        "sustained rate; raise --num-prompts"
    )


def throughput(run: Run) -> dict[str, float]:
    """Rates over the whole run. Errors complete nothing; good ones met the SLO."""
    done, seconds = run.completed, max(run.seconds, 1e-9)
    speeds = np.array([1 / row.tpot_s for row in done if row.tpot_s])
    good = run.good
    return {
        "requests_per_s": len(done) / seconds,
        "requests_per_minute": 60 * len(done) / seconds,
        "input_tokens_per_s": sum(row.input_tokens for row in done) / seconds,
        "output_tokens_per_s": sum(row.output_tokens for row in done) / seconds,
        "tokens_per_s_per_user": float(np.median(speeds)) if len(speeds) else math.nan,
        "characters_per_s": sum(row.characters for row in done) / seconds,
        "goodput_requests_per_s": len(good) / seconds,
        "goodput_output_tokens_per_s": sum(row.output_tokens for row in good) / seconds,
        "attainment": run.attainment,
        "offered": len(run.rows),
        "completed": len(done),
        "failed": len(run.rows) - len(done),
        "dropped": run.dropped,
        "cached_input_share": sum(row.cached_tokens for row in done) / max(1, sum(row.input_tokens for row in done)),
        "late_for_reader": late_for_reader(done),
        "most_at_once": at_once(run.rows),
    }


def per_character(run: Run) -> dict[str, float]:
    """Figures that do not depend on a tokenizer, medians over requests."""
    rows = [row for row in run.completed if row.characters and row.first_s is not None and row.last_s is not None]
    speeds = [row.characters / (row.last_s - row.sent_s) for row in rows if row.last_s and row.last_s > row.sent_s]
    each = [1e3 * row.e2e_s / row.characters for row in rows if row.e2e_s]
    tokens = sum(row.output_tokens for row in rows)
    return {
        "characters_per_s_per_user": float(np.median(speeds)) if speeds else math.nan,
        "e2e_ms_per_character": float(np.median(each)) if each else math.nan,
        "characters_per_output_token": sum(row.characters for row in rows) / tokens if tokens else math.nan,
    }


def at_once(rows: Sequence[Row]) -> int:
    """Most requests under way at the same time."""
    edges = sorted([(row.sent_s, 1) for row in rows] + [(row.ended_s, -1) for row in rows])
    return int(max(np.cumsum([step for _, step in edges]), default=0))


def run_json(run: Run) -> dict[str, Any]:
    """All figures of a run, with vLLM's keys on the top level and ours, intervals included, under "ridgeline"."""
    rates, facts, done = throughput(run), run.facts, run.completed
    spreads = {name: spread(run, name) for name in (*LATENCIES, "publish")}
    found: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "backend": "openai-chat" if facts.get("chat") else "openai",
        "label": facts.get("label"),
        "model_id": facts.get("model"),
        "tokenizer_id": None,
        "num_prompts": len(run.rows),
        "request_rate": facts.get("rate") if facts.get("rate") is not None else "inf",
        "burstiness": facts.get("burstiness"),
        "max_concurrency": facts.get("concurrency"),
        "duration": run.seconds,
        "completed": len(done),
        "failed": len(run.rows) - len(done),
        "total_input_tokens": sum(row.input_tokens for row in done),
        "total_output_tokens": sum(row.output_tokens for row in done),
        "request_throughput": rates["requests_per_s"],
        "request_goodput": rates["goodput_requests_per_s"] if run.slo else None,
        "output_throughput": rates["output_tokens_per_s"],
        "total_token_throughput": rates["output_tokens_per_s"] + rates["input_tokens_per_s"],
        "max_concurrent_requests": rates["most_at_once"],
    }
    for ours, theirs in _VLLM.items():
        found |= _vllm_latency(theirs, spreads[ours])
    send, loop = lag_p99(run)
    found["ridgeline"] = {
        "clock": "latencies count from the scheduled time",
        "invalid": trouble(run),
        "slo_text": str(run.slo),
        "slo_broken": list(run.broken),
        "throughput": rates,
        "per_character": per_character(run),
        "latency_s": {name: asdict(one) for name, one in spreads.items()},
        "client": {"send_lag_p99_s": send, "loop_lag_p99_s": loop, "cpu_share": cpu_share(run)},
        "tokens_counted_by": _counted(done),
        "errors": errors(run),
        "missed": missed(run),
    }
    return found


def _vllm_latency(name: str, one: Spread) -> dict[str, float]:
    found = {
        f"mean_{name}_ms": one.mean.value * 1e3,
        f"median_{name}_ms": one.percentiles[50].value * 1e3,
        f"std_{name}_ms": one.std * 1e3,
    }
    return found | {f"p{share}_{name}_ms": value.value * 1e3 for share, value in one.percentiles.items()}


def _counted(rows: Sequence[Row]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        found[row.counted] = found.get(row.counted, 0) + 1
    return found


def errors(run: Run) -> dict[str, int]:
    """Errors by their words."""
    found: dict[str, int] = {}
    for row in run.rows:
        if row.error:
            found[row.error] = found.get(row.error, 0) + 1
    return found


def missed(run: Run) -> dict[str, int]:
    """Requests that are not good, by what they missed: "error" or the limit's name."""
    found: dict[str, int] = {}
    for row in run.rows:
        why = row.missed(run.slo)
        if why:
            name = why.split(":")[0].split(" ")[0]
            found[name] = found.get(name, 0) + 1
    return found
