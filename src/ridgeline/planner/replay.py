"""Replays recorded requests with other options: what the percentiles would have been, with intervals.

The recorded requests are simulated twice, as they were served and with the changes. An estimate is the recorded figure times the
ratio of the two, so that what the simulation gets wrong in both cancels. Intervals stand for another run of the same traffic: the
requests are resampled in blocks of neighbours (Kuensch 1989, the block bootstrap), because neighbours wait for each other, and each
sample is simulated both ways.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.core.errors import ConfigError
from ridgeline.core.quantization import quantized
from ridgeline.core.slo import reader_pace
from ridgeline.core.spec import KV_FORMATS, ModelSpec, kv_layout
from ridgeline.core.workload import RequestSpec, Workload
from ridgeline.engine.policy import admission
from ridgeline.kv.retention import read_retention
from ridgeline.planner.fleet import Fleet, simulate_fleet
from ridgeline.planner.simulate import Outcome, quantile, serve
from ridgeline.planner.situation import Situation

BLOCKS = 5
"""Blocks of neighbours of which a sample consists. They must be longer than a queue lasts."""
RESAMPLES = 20
COVERAGE = 0.9
"""Of the intervals."""
FIGURES: Mapping[str, tuple[str, float]] = {
    "TTFT p50": ("ttft_s", 0.5), "TTFT p90": ("ttft_s", 0.9), "TTFT p99": ("ttft_s", 0.99), "TPOT p50": ("tpot_s", 0.5),
    "TPOT p90": ("tpot_s", 0.9), "TPOT p99": ("tpot_s", 0.99), "whole answer p50": ("e2e_s", 0.5),
    "whole answer p99": ("e2e_s", 0.99),
}  # fmt: skip
"""What is estimated: a latency, and the share of requests that it covers."""


# --- changes -------------------------------------------------------------------------------------------------------------


def _weights(now: Situation, name: str) -> Situation:
    if now.spec.quantization:
        raise ConfigError(
            f"--quantization: the recorded server has weights in {now.spec.quantization} already, which cannot be changed back.",
            param="quantization",
        )
    return _as(now, quantized(now.spec, name), replace(now, model=replace(now.model, quantization=name)))


def _as(now: Situation, spec: ModelSpec, changed: Situation) -> Situation:
    served = now.served_as(spec)
    return replace(changed, server=served.server, spec=served.spec)


def _cache(now: Situation, name: str) -> Situation:
    """As many bytes of cache in another format, which hold more tokens. Attention is predicted by the bytes that it reads."""
    if name not in (*KV_FORMATS, "auto"):
        raise ConfigError(f"--kv-cache-dtype is {name!r}: give one of {', '.join(KV_FORMATS)}.", param="kv_cache_dtype")
    spec = replace(now.spec, kv_format="" if name in ("auto", now.spec.dtype) else name)
    layout = kv_layout(spec, now.server.layout.page_tokens)
    pages = max(1, now.server.pages * now.server.layout.page_bytes // layout.page_bytes)
    server = replace(now.server, cost=replace(now.server.cost, spec=spec), layout=layout, pages=pages)
    return replace(now, server=server, spec=spec, model=replace(now.model, kv_cache_dtype=name))


def _limits(name: str) -> Callable[[Situation, Any], Situation]:
    def change(now: Situation, value: Any) -> Situation:
        return replace(now, server=replace(now.server, limits=replace(now.server.limits, **{name: value})))

    return change


def _server(name: str, read: Callable[[Situation, Any], Any] = lambda now, value: value) -> Callable[..., Situation]:
    def change(now: Situation, value: Any) -> Situation:
        return replace(now, server=replace(now.server, **{name: read(now, value)}))

    return change


def _batching(now: Situation, value: str) -> str:
    admission(value)  # raises ConfigError for an unknown policy
    return value


CHANGES: Mapping[str, Callable[[Situation, Any], Situation]] = {
    "quantization": _weights,
    "kv_cache_dtype": _cache,
    "max_num_batched_tokens": _limits("step_tokens"),
    "max_num_seqs": _limits("rows"),
    "reader_pace": lambda now, value: _limits("pace_s")(now, reader_pace(value)),
    "enable_prefix_caching": _server("prefix_cache"),
    "batching": _server("batching", _batching),
    "kv_retention": _server("retention", lambda now, value: read_retention(value, now.server.layout.page_tokens)),
    "kv_cache_memory": _server("pages", lambda now, value: max(1, value // now.server.layout.page_bytes)),
    "steps_in_flight": _server("steps_in_flight"),
}
"""Options that can be replayed, and what they change. Any other option is refused."""


def changed(now: Situation, options: Mapping[str, Any]) -> Situation:
    """The situation with other options. Raises ConfigError for an option that a replay cannot judge, or a value that the server
    would refuse."""
    for name, value in options.items():
        if name not in CHANGES:
            known = ", ".join(f"--{option.replace('_', '-')}" for option in CHANGES)
            raise ConfigError(
                f"--{name.replace('_', '-')} cannot be replayed: give some of {known}, --replicas and --route.",
                param=name,
            )
        now = CHANGES[name](now, value)
        if name not in ("quantization", "kv_cache_dtype"):
            now = replace(now, engine=replace(now.engine, **{name: value}))
    if now.server.limits.rows > now.server.limits.step_tokens:
        raise ConfigError(
            f"--max-num-batched-tokens is {now.server.limits.step_tokens}, below the {now.server.limits.rows} requests at once: "
            "raise it, or lower --max-num-seqs.",
            param="max_num_batched_tokens",
        )
    return now


# --- estimates -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """Servers that serve the recorded requests: `replicas` equal ones behind the router with the policy `route`."""

    situation: Situation
    replicas: int = 1
    route: str = "prefix"

    def outcomes(self, workload: Workload) -> list[Outcome]:
        """Raises ConfigError if a request can never run."""
        now = self.situation
        if now.concurrency is not None:  # a closed loop has no times: requests go to the replicas in turn
            return serve(replace(now.server, replicas=self.replicas), workload, now.concurrency).outcomes
        fleet = Fleet(now.server, self.replicas, self.route, now.server.limits.rows)
        by_number = simulate_fleet(fleet, workload).outcomes
        return [by_number[number] for number in sorted(by_number)]


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure in seconds, and between which values it lies in COVERAGE of other runs."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """One figure. recorded: what clients saw. as_recorded, simulated: simulations of the server as it was, and with the changes.
    expected: the recorded figure times their ratio."""

    name: str
    recorded: Interval
    as_recorded: float
    simulated: Interval
    expected: Interval

    @property
    def change(self) -> float:
        return self.simulated.value / self.as_recorded - 1


def figures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The values of FIGURES."""
    columns = {
        name: sorted(value for outcome in outcomes if (value := getattr(outcome, name)) == value)
        for name in ("ttft_s", "tpot_s", "e2e_s")
    }
    return {name: quantile(columns[column], share) for name, (column, share) in FIGURES.items()}


def replay(before: Case, after: Case, recorded: Sequence[Outcome], resamples: int = RESAMPLES) -> list[Estimate]:
    """Estimates of FIGURES with `after` in place of `before`, which is how the requests were recorded."""
    load = before.situation.workload
    seen, now, then = (figures(outcomes) for outcomes in (recorded, before.outcomes(load), after.outcomes(load)))
    source, others = random.Random(0), list[tuple[dict[str, float], ...]]()
    for _ in range(resamples):
        sample = resampled(load, source)
        drawn = [recorded[place] for place in _places(len(recorded), source)]
        others.append((figures(drawn), figures(before.outcomes(sample)), figures(after.outcomes(sample))))
    return [_estimate(name, (seen, now, then), others) for name in FIGURES]


def _estimate(name: str, values: Sequence[dict[str, float]], others: Sequence[Sequence[dict[str, float]]]) -> Estimate:
    seen, now, then = (each[name] for each in values)
    ratios = [after[name] / before[name] for _, before, after in others]
    spread = [real[name] * ratio for (real, _, _), ratio in zip(others, ratios, strict=True)]
    return Estimate(
        name,
        _interval(seen, [real[name] for real, _, _ in others]),
        now,
        _interval(then, [after[name] for _, _, after in others]),
        _interval(seen * then / now, spread),
    )


def _interval(value: float, others: Sequence[float]) -> Interval:
    """The spread of the samples around their median, applied to the value: joints between blocks shorten queues a little, in all
    samples alike."""
    ordered = sorted(other for other in others if other == other)
    tail, middle = (1 - COVERAGE) / 2, quantile(ordered, 0.5)
    if not middle > 0:
        return Interval(value, value, value)
    return Interval(value, *(value * quantile(ordered, share) / middle for share in (tail, 1 - tail)))


def resampled(workload: Workload, source: random.Random) -> Workload:
    """As many requests, in blocks of neighbours drawn with replacement. Each keeps its distance in time to the one before it."""
    requests, at, drawn = workload.requests, 0.0, list[RequestSpec]()
    for place in _places(len(requests), source):
        gap = requests[place].at_s - requests[place - 1].at_s if place else 0.0
        at += gap
        drawn.append(replace(requests[place], at_s=at))
    return replace(workload, requests=tuple(drawn))


def _places(count: int, source: random.Random) -> Iterator[int]:
    """Places of `count` elements in blocks of neighbours."""
    size, left = max(1, count // BLOCKS), count
    while left > 0:
        first = source.randrange(count - size + 1)
        yield from range(first, first + min(size, left))
        left -= size
