"""The metrics of one engine. Updated once per step and once per request, never per token; no global registry."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from ridgeline.core.slo import Slo
from ridgeline.metrics.catalogue import COUNTERS, GAUGES, HISTOGRAMS, LIVE, Entry, one_two_five
from ridgeline.metrics.live import Live
from ridgeline.metrics.records import RequestRecord, StepRecord

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "ridgeline"
DEFAULT_CONTEXT = 131_072
NO_SLO = Slo()


class Histogram:
    """Counts by bucket (`edges` are inclusive upper bounds), and the sum. An observation may weigh more than one."""

    __slots__ = ("counts", "edges", "total")

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = tuple(edges)
        self.counts = [0] * (len(self.edges) + 1)
        self.total = 0.0

    def add(self, value: float, weight: int = 1) -> None:
        self.counts[bisect_left(self.edges, value)] += weight
        self.total += value * weight

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), the last bound infinite."""
        found, below = [], 0
        for edge, count in zip((*self.edges, math.inf), self.counts, strict=True):
            below += count
            found.append((floatToGoString(edge), float(below)))
        return found


class Metrics:
    """All series of one engine, labelled model_name and engine.

    alias: "vllm" shows what vLLM has under its prefix too. slo: what live goodput is counted by. clock: seconds that
    only grow.
    """

    def __init__(
        self,
        model_name: str,
        alias: str = "",
        *,
        engine: str = "0",
        slo: Slo = NO_SLO,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._labels = {"model_name": model_name, "engine": engine}
        self._prefixes = [PREFIX, alias] if alias else [PREFIX]
        self._clock = clock
        self.live = Live(slo, clock)
        self._last_step: float | None = None
        self._gauges = dict.fromkeys(GAUGES, 0.0)
        self._counters: dict[tuple[str, str], float] = {
            (name, ""): 0.0 for name in COUNTERS if not COUNTERS[name].label
        }
        self._histograms: dict[str, Histogram] = {}
        self._cache: dict[str, str] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._set_edges(DEFAULT_CONTEXT)

    # --- news -------------------------------------------------------------------------------------------------------

    def on_ready(self, max_len: int, page_tokens: int, blocks: int) -> None:
        """The engine serves: its context bounds the token histograms, its cache is described. Forgets observations."""
        self._set_edges(max_len)
        self._cache = {"block_size": str(page_tokens), "num_gpu_blocks": str(blocks)}

    def on_step(self, step: StepRecord) -> None:
        """Take one step's record."""
        gauges = self._gauges
        blocks = max(1, step.blocks_total)
        gauges["num_requests_running"] = step.running
        gauges["num_requests_waiting"] = step.waiting
        gauges["kv_cache_usage_perc"] = step.blocks_used / blocks
        gauges["kv_cache_cached_perc"] = step.blocks_cached / blocks
        gauges["kv_waste_inside_perc"] = step.waste_inside
        gauges["kv_waste_between_perc"] = step.waste_between
        self._count("prompt_tokens", step.prompt_tokens)
        self._count("generation_tokens", step.output_tokens)
        self._count("prefix_cache_queries", step.prefix_queries)
        self._count("prefix_cache_hits", step.prefix_hits)
        self._count("num_preemptions", step.preempted)
        self._count("spec_decode_num_draft_tokens", step.drafted)
        self._count("spec_decode_num_accepted_tokens", step.accepted)
        self._count("steps", step.steps)
        self._count("failed_steps", step.failed)
        self._count("generation_tokens_dropped", step.dropped)
        if step.steps:
            self._count("step_device_seconds", step.device_s)
            self._histograms["iteration_tokens_total"].add(step.prompt_tokens + step.output_tokens)
            self._histograms["scheduler_host_seconds"].add(step.host_s)
            for part, seconds in (("plan", step.plan_s), ("commit", step.commit_s), ("reply", step.reply_s)):
                self._count("scheduler_host_part_seconds", seconds, part)
        now = self._clock()
        gap = None if self._last_step is None else now - self._last_step
        if gap is not None and step.output_tokens:
            self._histograms["inter_token_latency_seconds"].add(gap, step.output_tokens)
        self._last_step = now if step.running else None
        self.live.on_step(step, gap)

    def on_request(self, record: RequestRecord) -> None:
        """A request has ended; one that was cut off counts as aborted and in the ledger alone."""
        self.live.on_request(record)
        if record.cut:
            self.aborted(record.cut)
            return
        spent = record.spent
        seen: dict[str, float | None] = {
            "time_to_first_token_seconds": record.ttft_s,
            "request_time_per_output_token_seconds": record.tpot_s,
            "e2e_request_latency_seconds": record.e2e_s,
            "request_queue_time_seconds": spent.queue_s,
            "request_prefill_time_seconds": spent.prefill_s,
            "request_decode_time_seconds": spent.decode_s,
            "request_inference_time_seconds": spent.prefill_s + spent.decode_s,
            "request_prompt_tokens": record.prompt_tokens,
            "request_generation_tokens": record.output_tokens,
            "request_params_max_tokens": record.max_tokens,
            "request_params_n": len(record.finish_reasons),
        }
        for name, value in seen.items():
            if value is not None:
                self._histograms[name].add(value)
        self._count("prompt_tokens_cached", record.cached_tokens)
        for reason in record.finish_reasons:
            self._count("request_success", 1, reason)

    def aborted(self, reason: str) -> None:
        """A request ended before its answer did, or was refused: "cancelled", "error", "overloaded", ..."""
        self._count("aborted_requests", 1, reason)

    # --- export -----------------------------------------------------------------------------------------------------

    def render(self) -> bytes:
        """All series in the text format whose content type is CONTENT_TYPE."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Every family, once per prefix (prometheus_client asks for this)."""
        for prefix in self._prefixes:
            yield from self._families(prefix)

    def _families(self, prefix: str) -> Iterator[Metric]:
        names, values = list(self._labels), list(self._labels.values())
        for name, entry in _shown(GAUGES, prefix):
            gauge = GaugeMetricFamily(f"{prefix}:{name}", entry.text, labels=names)
            gauge.add_metric(values, self._gauges[name])
            yield gauge
        for name, entry in _shown(COUNTERS, prefix):
            more = [entry.label] if entry.label else []
            counter = CounterMetricFamily(f"{prefix}:{name}", entry.text, labels=names + more)
            for (other, label), count in self._counters.items():
                if other == name:
                    counter.add_metric(values + ([label] if more else []), count)
            yield counter
        for name, entry in _shown(HISTOGRAMS, prefix):
            histogram = HistogramMetricFamily(f"{prefix}:{name}", entry.text, labels=names)
            held = self._histograms[name]
            histogram.add_metric(values, held.buckets(), held.total)
            yield histogram
        if prefix == PREFIX:
            yield from self._live_families(names, values)
        if self._cache:
            info = GaugeMetricFamily(f"{prefix}:cache_config_info", "The KV cache.", labels=names + list(self._cache))
            info.add_metric(values + list(self._cache.values()), 1.0)
            yield info

    def _live_families(self, names: list[str], values: list[str]) -> Iterator[Metric]:
        """The last minutes: gauges, latencies by quantile, alerts that are raised."""
        figures = self.live.figures()
        for name, entry in LIVE.items():
            if name in figures:
                gauge = GaugeMetricFamily(f"{PREFIX}:{name}", entry.text, labels=names)
                gauge.add_metric(values, figures[name])
                yield gauge
        latency = GaugeMetricFamily(
            f"{PREFIX}:latency_window_seconds",
            "Latencies of the last minutes by quantile.",
            labels=[*names, "latency", "quantile"],
        )
        for what, share, seconds in self.live.quantiles():
            latency.add_metric([*values, what, f"{share:g}"], seconds)
        yield latency
        blamed = GaugeMetricFamily(
            f"{PREFIX}:slo_missed_requests",
            "Requests of the last minutes that missed the SLO, by what is to blame.",
            labels=[*names, "blame"],
        )
        for what, count in self.live.blamed().items():
            blamed.add_metric([*values, what], count)
        yield blamed
        alert = GaugeMetricFamily(f"{PREFIX}:alert", "1 for every rule that is broken now.", labels=[*names, "rule"])
        for raised in self.live.history.alerts():
            alert.add_metric([*values, raised.rule], 1.0)
        yield alert

    def _count(self, name: str, more: float, label: str = "") -> None:
        key = name, label
        self._counters[key] = self._counters.get(key, 0.0) + more

    def _set_edges(self, max_len: int) -> None:
        tokens = tuple(one_two_five(max_len))
        self._histograms = {name: Histogram(entry.edges or tokens) for name, entry in HISTOGRAMS.items()}


def _shown(catalogue: Mapping[str, Entry], prefix: str) -> Iterator[tuple[str, Entry]]:
    """Entries of a catalogue that exist under a prefix."""
    return ((name, entry) for name, entry in catalogue.items() if prefix == PREFIX or not entry.ours)
