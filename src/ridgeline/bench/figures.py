"""Figures of a run: the content of run.json, the rows of the table, and the validity of the run.

Latencies count from the scheduled time. The top level of run.json has the keys of `vllm bench serve`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from ridgeline.bench.economics import economics_json
from ridgeline.bench.record import Row, Run
from ridgeline.bench.sample import SHARES, Array, Figure, figure, mean, percentile, token_percentiles

LAG_FLOOR_S = 0.010
LAG_SHARE = 0.05
CPU_LIMIT = 0.9
"""A run is invalid if the p99 of the client's lag exceeds both LAG_FLOOR_S and LAG_SHARE of the median TTFT, or if the client is
busy for more than CPU_LIMIT of the time."""

READER_S = 0.12
"""Seconds that a fast reader needs for a token."""
LATENCIES: Mapping[str, str] = {
    "ttft": "time to first token",
    "publish": "time to publish (first visible content)",
    "tpot": "time per output token after the first",
    "itl": "time between tokens",
    "chunk": "time between chunks",
    "e2e": "end to end",
}
_VLLM_NAMES = {"ttft": "ttft", "tpot": "tpot", "chunk": "itl", "e2e": "e2el"}
"""Latency -> its name in vLLM. vLLM's ITL is the time between chunks, regardless of the number of tokens in a chunk."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of a latency over requests (or tokens), in seconds, with confidence intervals."""

    mean: Figure
    percentiles: Mapping[int, Figure]
    std: float
    count: int


def digits(value: float) -> str:
    """Format with four significant digits and without an exponent: 12.34, 123.4, 12345."""
    return "-" if math.isnan(value) else f"{value:.0f}" if abs(value) >= 9999.5 else f"{value:.4g}"


def latency(rows: Sequence[Row], name: str) -> Array:
    """Return a latency of all completed requests that have it, in seconds."""
    values = (getattr(row, f"{name}_s") for row in rows if not row.error)
    return np.array([value for value in values if value is not None], dtype=float)


def spread(run: Run, name: str) -> Spread:
    """Compute the distribution of a latency. For itl, a gap before k tokens counts as k gaps of a k-th of its length."""
    rows = run.completed
    if name in ("itl", "chunk"):
        return _gap_spread(rows, by_token=name == "itl")
    return _spread_of(latency(rows, name))


def _spread_of(values: Array) -> Spread:
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
    pooled, all_weights = np.concatenate(values), np.concatenate(weights)
    if not all_weights.sum():
        all_weights = np.ones(len(pooled))
    center = float(np.average(pooled, weights=all_weights))
    std = math.sqrt(float(np.average((pooled - center) ** 2, weights=all_weights)))
    # Requests are the independent samples here too, so the interval is that of the mean over requests.
    means = np.array(
        [np.average(gaps, weights=weight) for gaps, weight in zip(values, weights, strict=True) if weight.sum()]
    )
    figure_of_means = figure(means, mean)
    shift = center - figure_of_means.value
    return Spread(Figure(center, figure_of_means.low + shift, figure_of_means.high + shift), shares, std, len(pooled))


def late_for_reader(rows: Sequence[Row]) -> float:
    """Return the share of tokens that came late for a reader who starts at the first token and reads one per READER_S."""
    late = total = 0
    for row in rows:
        elapsed, n_read = 0.0, sum(row.counts[:1])
        total += sum(row.counts)
        for gap, count in zip(row.gaps_s, row.counts[1:], strict=True):
            elapsed += gap
            # Of the tokens n_read .. n_read + count - 1, those are late whose reading time has passed.
            late += max(0, min(count, math.ceil(elapsed / READER_S - 1e-9) - n_read))
            n_read += count
    return late / total if total else math.nan


STEADY = 3.0
"""Arrivals must last for this many median answer times before a rate counts as sustained."""


def invalid_reason(run: Run) -> str:
    """Return why a run is invalid (the load generator was the bottleneck), or ""."""
    ttft = latency(run.rows, "ttft")
    limit = max(LAG_FLOOR_S, LAG_SHARE * float(np.median(ttft))) if len(ttft) else LAG_FLOOR_S
    send_lag, loop_lag = lag_p99(run)
    for event, lag in (("requests were sent", send_lag), ("the event loop ran", loop_lag)):
        if lag > limit:
            rule = f"more than {limit * 1e3:.1f} ms, the greater of 10 ms and 5 % of the median TTFT"
            return f"{event} {lag * 1e3:.1f} ms late (p99), {rule}: the client is the bottleneck"
    if cpu_share(run) > CPU_LIMIT:
        return f"the client was busy for {cpu_share(run):.0%} of the time: it is the bottleneck"
    return ""


CACHED_SHARE = 0.5
"""Share of the prompt tokens from the server's prefix cache above which `warnings` names a workload without common prefixes. A
chat template is a common prefix of every workload, but a short one."""


def warnings(run: Run) -> list[str]:
    """What a reader of the figures must know although they are valid: the run was interrupted, or its prompts were cached."""
    lines = [run.facts["interrupted"]] if run.interrupted else []
    cached = throughput(run)["cached_input_share"]
    if cached > CACHED_SHARE and run.facts.get("shared_prefixes") is False:
        lines.append(
            f"{cached:.0%} of the prompt tokens came from the server's prefix cache, although the prompts have no common prefix: "
            f"an earlier run with --seed {run.facts.get('seed')} has sent them; give another --seed"
        )
    return lines


def lag_p99(run: Run) -> tuple[float, float]:
    """Return the 99th percentiles of the send lag and of the event loop's lag, in seconds."""
    send_lags = np.array([row.lag_s for row in run.rows])
    loop_lags = np.array(run.loop_lag_s)
    return tuple(float(np.percentile(lags, 99)) if len(lags) else 0.0 for lags in (send_lags, loop_lags))  # type: ignore[return-value]


def cpu_share(run: Run) -> float:
    """Return the share of one core that the client used."""
    return run.cpu_s / run.seconds if run.seconds > 0 else 0.0


def kept_up(run: Run) -> float:
    """Return the completion rate over the arrival rate, each between its 10th and 90th percentile.

    It is 1 for a server that keeps up, and less if the queue grows.
    """
    ends = np.array([row.ended_s for row in run.completed])
    scheduled = np.array([row.scheduled_s for row in run.rows])
    if len(ends) < 10:
        return math.nan
    arrival_span, completion_span = (float(np.subtract(*np.percentile(times, [90, 10]))) for times in (scheduled, ends))
    return arrival_span / completion_span * len(ends) / len(scheduled) if completion_span > 0 else math.nan


def too_short_reason(run: Run) -> str:
    """Return why a run was too short for a steady state (its arrivals lasted less than STEADY median answers), or ""."""
    scheduled = [row.scheduled_s for row in run.rows]
    answers = latency(run.rows, "e2e")
    if len(scheduled) < 2 or not len(answers) or math.isinf(run.facts.get("rate") or math.inf):
        return ""
    span, answer = max(scheduled) - min(scheduled), float(np.median(answers))
    if span >= STEADY * answer:
        return ""
    return (
        f"all requests arrived within {span:.3g} s, and the median answer took {answer:.3g} s: the run is too short to show a "
        "sustained rate; raise --num-prompts"
    )


def throughput(run: Run) -> dict[str, float]:
    """Compute rates over the run. Failed requests do not count as completed; good requests met the SLO."""
    completed, seconds = run.completed, max(run.seconds, 1e-9)
    speeds = np.array([1 / row.tpot_s for row in completed if row.tpot_s])
    good = run.good
    return {
        "requests_per_s": len(completed) / seconds,
        "requests_per_minute": 60 * len(completed) / seconds,
        "input_tokens_per_s": sum(row.input_tokens for row in completed) / seconds,
        "output_tokens_per_s": sum(row.output_tokens for row in completed) / seconds,
        "tokens_per_s_per_user": float(np.median(speeds)) if len(speeds) else math.nan,
        "characters_per_s": sum(row.characters for row in completed) / seconds,
        "goodput_requests_per_s": len(good) / seconds,
        "goodput_output_tokens_per_s": sum(row.output_tokens for row in good) / seconds,
        "attainment": run.attainment,
        "offered": len(run.rows),
        "completed": len(completed),
        "failed": len(run.rows) - len(completed),
        "dropped": run.dropped,
        "cached_input_share": sum(row.cached_tokens for row in completed)
        / max(1, sum(row.input_tokens for row in completed)),
        "late_for_reader": late_for_reader(completed),
        "most_at_once": at_once(run.rows),
    }


def per_character(run: Run) -> dict[str, float]:
    """Compute figures that do not depend on a tokenizer, as medians over requests."""
    rows = [row for row in run.completed if row.characters and row.first_s is not None and row.last_s is not None]
    speeds = [row.characters / (row.last_s - row.sent_s) for row in rows if row.last_s and row.last_s > row.sent_s]
    ms_per_character = [1e3 * row.e2e_s / row.characters for row in rows if row.e2e_s]
    tokens = sum(row.output_tokens for row in rows)
    return {
        "characters_per_s_per_user": float(np.median(speeds)) if speeds else math.nan,
        "e2e_ms_per_character": float(np.median(ms_per_character)) if ms_per_character else math.nan,
        "characters_per_output_token": sum(row.characters for row in rows) / tokens if tokens else math.nan,
    }


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Figures of the agent runs of a benchmark. Runs with a failed request are not complete."""

    offered: int
    completed: int
    calls: float
    """Requests of a complete run, on average."""
    output_tokens: float
    """Of a complete run, on average."""
    publish: Spread
    """From the scheduled time of a run's first request to the first visible content of its last one."""


def agent_runs(run: Run) -> RunFigures | None:
    """Compute the figures of agent runs. None if no request has a run id."""
    by_id: dict[str, list[Row]] = {}
    for row in run.rows:
        if row.run_id:
            by_id.setdefault(row.run_id, []).append(row)
    complete = [rows for rows in by_id.values() if not any(row.error for row in rows)]
    if not by_id:
        return None
    times = []
    for rows in complete:
        first, last = (choose(rows, key=lambda row: row.scheduled_s) for choose in (min, max))
        if last.publish_s is not None:
            times.append(last.scheduled_s + last.publish_s - first.scheduled_s)
    rows = [row for rows in complete for row in rows]
    count = len(complete) or math.nan
    n_tokens = sum(row.output_tokens for row in rows)
    publish = _spread_of(np.array(times, dtype=float))
    return RunFigures(len(by_id), len(complete), len(rows) / count, n_tokens / count, publish)


def at_once(rows: Sequence[Row]) -> int:
    """Return the largest number of concurrent requests."""
    edges = sorted([(row.sent_s, 1) for row in rows] + [(row.ended_s, -1) for row in rows])
    return int(max(np.cumsum([step for _, step in edges]), default=0))


def run_json(run: Run) -> dict[str, Any]:
    """Build run.json: vLLM's keys at the top level, Ridgeline's figures with intervals under "ridgeline"."""
    rates, facts, completed = throughput(run), run.facts, run.completed
    spreads = {name: spread(run, name) for name in LATENCIES}
    output: dict[str, Any] = {
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
        "completed": len(completed),
        "failed": len(run.rows) - len(completed),
        "total_input_tokens": sum(row.input_tokens for row in completed),
        "total_output_tokens": sum(row.output_tokens for row in completed),
        "request_throughput": rates["requests_per_s"],
        "request_goodput": rates["goodput_requests_per_s"] if run.slo else None,
        "output_throughput": rates["output_tokens_per_s"],
        "total_token_throughput": rates["output_tokens_per_s"] + rates["input_tokens_per_s"],
        "max_concurrent_requests": rates["most_at_once"],
    }
    for name, vllm_name in _VLLM_NAMES.items():
        output |= _vllm_latency(vllm_name, spreads[name])
    send_lag, loop_lag = lag_p99(run)
    output["ridgeline"] = {
        "clock": "latencies count from the scheduled time",
        "invalid": invalid_reason(run),
        "warnings": warnings(run),
        "slo_text": str(run.slo),
        "slo_broken": list(run.broken),
        "throughput": rates,
        "per_character": per_character(run),
        "agent_runs": None if (runs := agent_runs(run)) is None else asdict(runs),
        "latency_s": {name: asdict(latency_spread) for name, latency_spread in spreads.items()},
        "client": {"send_lag_p99_s": send_lag, "loop_lag_p99_s": loop_lag, "cpu_share": cpu_share(run)},
        "server_work": facts.get("counted"),
        "economics": economics_json(run),
        "tokens_counted_by": _counting_methods(completed),
        "errors": errors(run),
        "missed": missed(run),
    }
    return output


def _vllm_latency(name: str, latency_spread: Spread) -> dict[str, float]:
    output = {
        f"mean_{name}_ms": latency_spread.mean.value * 1e3,
        f"median_{name}_ms": latency_spread.percentiles[50].value * 1e3,
        f"std_{name}_ms": latency_spread.std * 1e3,
    }
    return output | {f"p{share}_{name}_ms": value.value * 1e3 for share, value in latency_spread.percentiles.items()}


def _counting_methods(rows: Sequence[Row]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.counted] = counts.get(row.counted, 0) + 1
    return counts


def errors(run: Run) -> dict[str, int]:
    """Count errors by message."""
    counts: dict[str, int] = {}
    for row in run.rows:
        if row.error:
            counts[row.error] = counts.get(row.error, 0) + 1
    return counts


def missed(run: Run) -> dict[str, int]:
    """Count requests that are not good, by "error" or the name of the missed limit."""
    counts: dict[str, int] = {}
    for row in run.rows:
        verdict = row.missed(run.slo)
        if verdict:
            name = verdict.split(":")[0].split(" ")[0]
            counts[name] = counts.get(name, 0) + 1
    return counts
