"""The metrics of one engine. Updated once per step and once per request, never per token; no global registry."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter

from ridgeline.core.slo import NO_SLO, Slo
from ridgeline.metrics.aliases import ALIASES, DERIVED, Alias
from ridgeline.metrics.catalogue import COUNTERS, GAUGES, HISTOGRAMS, LIVE, Entry, one_two_five
from ridgeline.metrics.exposition import gauge, head, labelled, number, sample
from ridgeline.metrics.live import Live
from ridgeline.metrics.records import RequestRecord, StepRecord

PREFIX = "ridgeline"
DEFAULT_CONTEXT = 131_072
FAMILIES: Mapping[str, str] = {
    "latency_window_seconds": "Latencies of the last minutes by quantile.",
    "slo_missed_requests": "Requests of the last minutes that missed the SLO, by cause.",
    "alert": "1 for every alert rule that is violated now.",
    "step_prediction_info": "Basis of predicted step times: a calibration (date, steps, error), or uncalibrated.",
}
"""Gauges with a label of their own, over the last minutes."""
UNCALIBRATED = "uncalibrated"
MOST_GATHERED = 1024
"""Records that wait to be added up when nobody reads."""
SUMMED: Mapping[str, Callable[[StepRecord], float]] = {
    "prompt_tokens": attrgetter("prompt_tokens"),
    "generation_tokens": attrgetter("output_tokens"),
    "prefix_cache_queries": attrgetter("prefix_queries"),
    "prefix_cache_hits": attrgetter("prefix_hits"),
    "num_preemptions": attrgetter("preempted"),
    "spec_decode_num_drafts": attrgetter("drafts"),
    "spec_decode_num_draft_tokens": attrgetter("drafted"),
    "spec_decode_num_accepted_tokens": attrgetter("accepted"),
    "steps": attrgetter("steps"),
    "failed_steps": attrgetter("failed"),
    "generation_tokens_dropped": attrgetter("dropped"),
    "estimated_flops_per_gpu": attrgetter("flops"),
    "estimated_moved_bytes_per_gpu": attrgetter("bytes"),
    "energy_joules": attrgetter("joules"),
}
"""Counters that add up a field of every record."""
PARTS: Mapping[str, Callable[[StepRecord], float]] = {
    name: attrgetter(f"{name}_s") for name in ("plan", "commit", "reply")
}
"""Of the scheduler's seconds, by label."""


class Histogram:
    """Counts by bucket (`edges` are inclusive upper bounds), and the sum. An observation may weigh more than one."""

    __slots__ = ("_stems", "counts", "edges", "total")

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = tuple(edges)
        self.counts = [0] * (len(self.edges) + 1)
        self._stems: dict[str, list[str]] = {}
        """By name: every bucket's line up to its value."""
        self.total = 0.0

    def add(self, value: float, weight: int = 1) -> None:
        self.counts[bisect_left(self.edges, value)] += weight
        self.total += value * weight

    def extend(self, values: Iterable[float]) -> None:
        """Add values of weight 1."""
        ordered = sorted(values)
        below = 0
        for place, edge in enumerate(self.edges):
            upto = bisect_right(ordered, edge)
            self.counts[place] += upto - below
            below = upto
        self.counts[-1] += len(ordered) - below
        self.total += sum(ordered)

    def buckets(self) -> list[tuple[float, int]]:
        """(upper bound, observations up to it), the last bound infinite."""
        return list(zip((*self.edges, math.inf), accumulate(self.counts), strict=True))

    def written(self, name: str, labels: str) -> str:
        """Its samples, under a name that always comes with the same labels."""
        if name not in self._stems:
            bounds = [number(edge) for edge, _ in self.buckets()]
            self._stems[name] = [f'{name}_bucket{{{labels},le="{bound}"}} ' for bound in bounds]
        lines = [f"{stem}{count}.0\n" for stem, count in zip(self._stems[name], accumulate(self.counts), strict=True)]
        count = float(sum(self.counts))
        return "".join([*lines, sample(f"{name}_count", labels, count), sample(f"{name}_sum", labels, self.total)])


class Metrics:
    """All series of one engine, labelled engine and model_name.

    alias: one of metrics.aliases.ALIASES, whose names are shown too, or "". slo: what live goodput is counted by. clock:
    seconds that only grow.
    """

    def __init__(
        self,
        model_name: str,
        alias: str = "",
        *,
        slo: Slo = NO_SLO,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model_name = model_name
        self._labels = {"engine": "0", "model_name": model_name}
        self._alias = ALIASES[alias] if alias else None
        self._clock = clock
        self.live = Live(slo, clock)
        self._last_step: float | None = None
        self._saved_s = 0.0
        self._steps: list[StepRecord] = []
        self._gaps: list[float | None] = []
        self._gauges = dict.fromkeys(GAUGES, 0.0)
        self._counters: dict[tuple[str, str], float] = {
            (name, ""): 0.0 for name in COUNTERS if not COUNTERS[name].label
        }
        self._histograms: dict[str, Histogram] = {}
        self._cache: dict[str, str] = {}
        self._set_edges(DEFAULT_CONTEXT)

    # --- news -------------------------------------------------------------------------------------------------------

    def on_ready(self, max_len: int, page_tokens: int, blocks: int) -> None:
        """The engine serves: its context bounds the token histograms, its cache is described.

        Another context than before forgets the observations; an engine that was restarted has the same one.
        """
        self._settle()
        if max_len != self._max_len:
            self._set_edges(max_len)
        self._cache = {"block_size": str(page_tokens), "num_gpu_blocks": str(blocks)}

    def on_step(self, step: StepRecord) -> None:
        """Take one step's record. Records gather until somebody reads, so that a step pays for little more than its place."""
        now = self._clock()
        gap = None if self._last_step is None else now - self._last_step
        self._last_step = now if step.running else None
        self._steps.append(step)
        self._gaps.append(gap)
        self.live.on_step(step, gap)
        if len(self._steps) >= MOST_GATHERED:
            self._settle()

    def _settle(self) -> None:
        """Add up the records that have gathered."""
        steps, gaps, self._steps, self._gaps = self._steps, self._gaps, [], []
        if not steps:
            return
        self._show(steps[-1])
        for name, read in SUMMED.items():
            self._count(name, sum(map(read, steps)))
        ran = [step for step in steps if step.steps]
        self._count("step_device_seconds", sum(step.device_s for step in ran))
        for step in ran:
            if step.drafts or step.saved_s:
                self._drafted(step)
        for late in (one for step in steps for one in step.late):
            self._count(f"late_{late.kind}s", 1)
            self._count("late_seconds", late.seconds, late.kind)
        for part, seconds in PARTS.items():
            self._count("scheduler_host_part_seconds", sum(map(seconds, ran)), part)
        tokens, host, between = (
            self._histograms[name]
            for name in ("iteration_tokens_total", "scheduler_host_seconds", "inter_token_latency_seconds")
        )
        tokens.extend([step.prompt_tokens + step.output_tokens for step in ran])
        host.extend([step.host_s for step in ran])
        for gap, step in zip(gaps, steps, strict=True):
            if gap is not None and step.output_tokens:
                between.add(gap, step.output_tokens)

    def _drafted(self, step: StepRecord) -> None:
        """A counter only grows: what tries lost is taken off what drafts save next."""
        for place, count in enumerate(step.accepted_at):
            self._count("spec_decode_num_accepted_tokens_per_pos", count, str(place))
        self._saved_s += step.saved_s
        if self._saved_s > 0:
            self._count("spec_decode_saved_seconds", self._saved_s)
            self._saved_s = 0.0

    def _show(self, step: StepRecord) -> None:
        """The gauges are those of the newest record."""
        gauges = self._gauges
        blocks = max(1, step.blocks_total)
        gauges["num_requests_running"] = step.running
        gauges["num_requests_waiting"] = step.waiting
        gauges["kv_cache_usage_perc"] = step.blocks_used / blocks
        gauges["kv_cache_cached_perc"] = step.blocks_cached / blocks
        gauges["kv_waste_inside_perc"] = step.waste_inside
        gauges["kv_waste_between_perc"] = step.waste_between

    def on_request(self, record: RequestRecord) -> None:
        """A request has ended; one that was cut off counts as aborted and in the ledger alone."""
        self.live.on_request(record)
        if record.cut:
            self.aborted(record.cut)
            return
        spent = record.spent
        seen: dict[str, float | None] = {
            "time_to_first_token_seconds": record.ttft_s,
            "time_to_first_visible_token_seconds": record.publish_s,
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

    def engine_restarted(self) -> None:
        """A lost engine is being replaced."""
        self._count("engine_restarts", 1)

    def shadowed(self, tokens: int, same: int, nats: float, mean: float) -> None:
        """An answer was scored by the reference too. nats: its divergences summed; mean: per token, of the last answers."""
        for name, more in (("answers", 1), ("tokens", tokens), ("same_tokens", same), ("kl_nats", nats)):
            self._count(f"shadow_{name}", more)
        self._gauges["shadow_kl"] = mean

    def shadow_failed(self) -> None:
        self._count("shadow_failures", 1)

    # --- export -----------------------------------------------------------------------------------------------------

    def render(self) -> bytes:
        """All series in the text format whose content type is CONTENT_TYPE, once per prefix."""
        self._settle()
        base = labelled(self._labels)
        lines = [*self._families(PREFIX, base), *self._live_families(base)]
        if self._alias is not None:
            lines += self._families(self._alias.prefix, base) if self._alias.stems else ()
            lines += self._renamed(self._alias, base)
        return "".join(lines).encode()

    def _families(self, prefix: str, base: str) -> Iterator[str]:
        """What counts for ever, family by family."""
        for name, entry in _shown(GAUGES, prefix):
            yield gauge(f"{prefix}:{name}", entry.text, [(base, self._gauges[name])])
        for name, entry in _shown(COUNTERS, prefix):
            full = f"{prefix}:{name}_total"
            yield head(full, "counter", entry.text)
            for (other, label), count in self._counters.items():
                if other == name:
                    more = f",{labelled({entry.label: label})}" if entry.label else ""
                    yield sample(full, base + more, count)
        for name, entry in _shown(HISTOGRAMS, prefix):
            yield head(f"{prefix}:{name}", "histogram", entry.text)
            yield self._histograms[name].written(f"{prefix}:{name}", base)
        if self._cache:
            yield gauge(f"{prefix}:cache_config_info", "The KV cache.", [(f"{base},{labelled(self._cache)}", 1.0)])

    def _renamed(self, alias: Alias, base: str) -> Iterator[str]:
        """What another engine calls otherwise; a gauge that cannot be known is not shown."""
        known = self._gauges | self._derived() | self.live.figures()
        texts = {**DERIVED, **{name: entry.text for name, entry in (*GAUGES.items(), *LIVE.items())}}

        def named(name: str) -> str:
            return f"{base},{labelled(alias.labels[name])}" if name in alias.labels else base

        for name, ours in alias.gauges.items():
            if ours in known:
                yield gauge(f"{alias.prefix}:{name}", texts[ours], [(named(name), known[ours])])
        for name, ours in alias.counters.items():
            full = f"{alias.prefix}:{name}_total"
            yield head(full, "counter", COUNTERS[ours].text) + sample(full, named(name), self._counters[ours, ""])
        for name, ours in alias.histograms.items():
            full = f"{alias.prefix}:{name}"
            yield head(full, "histogram", HISTOGRAMS[ours].text) + self._histograms[ours].written(full, base)

    def _derived(self) -> dict[str, float]:
        """See aliases.DERIVED."""
        drafts = self._counters["spec_decode_num_drafts", ""]
        slots = float(self._cache.get("block_size", 0)) * float(self._cache.get("num_gpu_blocks", 0))
        found = {
            "used_tokens": self._gauges["kv_cache_usage_perc"] * slots,
            "preempted": self._counters["num_preemptions", ""],
            "swapped": 0.0,
        }
        if drafts:
            found["mean_accepted_length"] = 1 + self._counters["spec_decode_num_accepted_tokens", ""] / drafts
        return found

    def _live_families(self, base: str) -> Iterator[str]:
        """The last minutes, under our own prefix: gauges, latencies by quantile, alerts that are raised."""
        live = self.live

        def of(name: str, value: str) -> str:
            return f"{base},{labelled({name: value})}"

        figures = live.figures()
        for name, entry in LIVE.items():
            if name in figures:
                yield gauge(f"{PREFIX}:{name}", entry.text, [(base, figures[name])])
        latencies = [
            (f"{of('latency', what)},{labelled({'quantile': f'{share:g}'})}", seconds)
            for what, share, seconds in live.quantiles()
        ]
        missed = [(of("blame", what), float(count)) for what, count in live.blamed().items()]
        alerts = [(of("rule", raised.rule), 1.0) for raised in live.history.alerts()]
        rests_on = [(of("calibration", live.ceilings.calibration or UNCALIBRATED), 1.0)] if self._cache else []
        for name, samples in zip(FAMILIES, (latencies, missed, alerts, rests_on), strict=True):
            yield gauge(f"{PREFIX}:{name}", FAMILIES[name], samples)

    def _count(self, name: str, more: float, label: str = "") -> None:
        key = name, label
        self._counters[key] = self._counters.get(key, 0.0) + more

    def _set_edges(self, max_len: int) -> None:
        self._max_len = max_len
        tokens = tuple(one_two_five(max_len))
        self._histograms = {name: Histogram(entry.edges or tokens) for name, entry in HISTOGRAMS.items()}


def _shown(catalogue: Mapping[str, Entry], prefix: str) -> Iterator[tuple[str, Entry]]:
    """Entries of a catalogue that exist under a prefix."""
    return ((name, entry) for name, entry in catalogue.items() if prefix == PREFIX or not entry.ours)
