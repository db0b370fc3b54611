"""The metrics of one engine. Updated once per step and once per request, never per token. There is no global registry."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter

from ridgeline.core.slo import NO_SLO, Slo
from ridgeline.metrics.agent_runs import MEASURES
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
    "user_tokens_per_second": "Output tokens per second seen by one user, of the last minutes' requests by quantile.",
    **{f"agent_run_{name}": f"{text} Of the last minutes, by quantile." for name, (text, _) in MEASURES.items()},
    "step_prediction_info": "Basis of predicted step times: a calibration (date, steps, error), or uncalibrated.",
}
"""Gauges over the last minutes that have a further label, with their help texts."""
UNCALIBRATED = "uncalibrated"
MAX_PENDING_RECORDS = 1024
"""Number of pending records at which they are added to the series even if nothing reads the metrics."""
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
    "useful_flops_per_gpu": attrgetter("useful_flops"),
    "draft_flops_per_gpu": attrgetter("draft_flops"),
    "draft_moved_bytes_per_gpu": attrgetter("draft_bytes"),
    "energy_joules": attrgetter("joules"),
    "prompt_energy_joules": attrgetter("prompt_joules"),
    "output_energy_joules": attrgetter("output_joules"),
}
"""Counters that sum a field over all records."""
PARTS: Mapping[str, Callable[[StepRecord], float]] = {
    name: attrgetter(f"{name}_s") for name in ("plan", "commit", "reply")
}
"""Parts of the scheduler's seconds, by label."""


class Histogram:
    """A histogram: counts by bucket and the sum of observations. `edges` are inclusive upper bounds."""

    __slots__ = ("_bucket_prefixes", "counts", "edges", "total")

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = tuple(edges)
        self.counts = [0] * (len(self.edges) + 1)
        self._bucket_prefixes: dict[str, list[str]] = {}
        """Name -> each bucket's line up to its value."""
        self.total = 0.0

    def add(self, value: float, weight: int = 1) -> None:
        self.counts[bisect_left(self.edges, value)] += weight
        self.total += value * weight

    def extend(self, values: Iterable[float]) -> None:
        """Add values of weight 1."""
        ordered = sorted(values)
        previous = 0
        for index, edge in enumerate(self.edges):
            cumulative = bisect_right(ordered, edge)
            self.counts[index] += cumulative - previous
            previous = cumulative
        self.counts[-1] += len(ordered) - previous
        self.total += sum(ordered)

    def buckets(self) -> list[tuple[float, int]]:
        """Return (upper bound, observations up to it) for each bucket. The last bound is infinite."""
        return list(zip((*self.edges, math.inf), accumulate(self.counts), strict=True))

    def render_samples(self, name: str, labels: str) -> str:
        """Format all samples. A name must always come with the same labels, because its bucket lines are cached."""
        if name not in self._bucket_prefixes:
            bounds = [number(edge) for edge, _ in self.buckets()]
            self._bucket_prefixes[name] = [f'{name}_bucket{{{labels},le="{bound}"}} ' for bound in bounds]
        lines = [
            f"{prefix}{count}.0\n"
            for prefix, count in zip(self._bucket_prefixes[name], accumulate(self.counts), strict=True)
        ]
        count = float(sum(self.counts))
        return "".join([*lines, sample(f"{name}_count", labels, count), sample(f"{name}_sum", labels, self.total)])


class Metrics:
    """All time series of one engine, with the labels engine and model_name."""

    def __init__(
        self,
        model_name: str,
        alias: str = "",
        *,
        slo: Slo = NO_SLO,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create all series with the value 0.

        Args:
            model_name: Value of the label model_name.
            alias: Key of metrics.aliases.ALIASES whose names are exported too, or "".
            slo: The server's SLO, for live goodput.
            clock: Monotonic seconds.
        """
        self.model_name = model_name
        self._labels = {"engine": "0", "model_name": model_name}
        self._alias = ALIASES[alias] if alias else None
        self._clock = clock
        self.live = Live(slo, clock)
        self._last_steps: dict[int, float] = {}
        """Time of the last record of each engine with running requests."""
        self._saved_s = 0.0
        self._tiers: dict[str, list[int]] = {}
        """Last reading of each tier below the KV cache."""
        self._pins: dict[tuple[str, str], int] = {}
        """Last reading of the events of pinned prefixes."""
        self._steps: list[StepRecord] = []
        self._gaps: list[float | None] = []
        self._gauges = dict.fromkeys(GAUGES, 0.0)
        self._counters: dict[tuple[str, str], float] = {
            (name, ""): 0.0 for name in COUNTERS if not COUNTERS[name].label
        }
        self._histograms: dict[str, Histogram] = {}
        self._cache: dict[str, str] = {}
        self._set_edges(DEFAULT_CONTEXT)

    # --- updates ----------------------------------------------------------------------------------------------------

    def on_ready(self, max_len: int, page_tokens: int, blocks: int) -> None:
        """Set the token histograms' range and the cache description when the engine is ready.

        Another `max_len` than before clears the histograms. A restarted engine has the same one and keeps them.
        """
        self._flush()
        if max_len != self._max_len:
            self._set_edges(max_len)
        self._cache = {"block_size": str(page_tokens), "num_gpu_blocks": str(blocks)}

    def on_step(self, step: StepRecord, engine: int = 0) -> None:
        """Add a step's record. Records stay pending until the metrics are read, so that a step costs little. engine: number of the
        engine process that ran it."""
        now = self._clock()
        last = self._last_steps.pop(engine, None)
        gap = None if last is None else now - last
        if step.running:
            self._last_steps[engine] = now
        self._steps.append(step)
        self._gaps.append(gap)
        self.live.on_step(step, gap)
        if len(self._steps) >= MAX_PENDING_RECORDS:
            self._flush()

    def _flush(self) -> None:
        """Add the pending records to the series."""
        steps, gaps, self._steps, self._gaps = self._steps, self._gaps, [], []
        if not steps:
            return
        self._set_gauges(steps[-1])
        for name, read in SUMMED.items():
            self._count(name, sum(map(read, steps)))
        run_steps = [step for step in steps if step.steps]
        self._count("step_device_seconds", sum(step.device_s for step in run_steps))
        for step in run_steps:
            if step.drafts or step.saved_s:
                self._count_drafts(step)
        for work in (work for step in steps for work in step.late):
            self._count(f"late_{work.kind}s", 1)
            self._count("late_seconds", work.seconds, work.kind)
        for tokens in (step.expert_tokens for step in steps if step.expert_tokens):
            self._count_experts(tokens)
        for tokens in (step.rank_tokens for step in steps if step.rank_tokens):
            self._count_ranks(tokens)
        for tiers in (step.tiers for step in steps if step.tiers):
            self._count_tiers(tiers)
        for pins in (step.pins for step in steps if step.pins):
            self._count_pins(pins)
        for part, seconds in PARTS.items():
            self._count("scheduler_host_part_seconds", sum(map(seconds, run_steps)), part)
        step_tokens, host_s, gap_s = (
            self._histograms[name]
            for name in ("iteration_tokens_total", "scheduler_host_seconds", "inter_token_latency_seconds")
        )
        step_tokens.extend([step.prompt_tokens + step.output_tokens for step in run_steps])
        host_s.extend([step.host_s for step in run_steps])
        for gap, step in zip(gaps, steps, strict=True):
            if gap is not None and step.output_tokens:
                gap_s.add(gap, step.output_tokens)

    def _count_experts(self, tokens: list[list[int]]) -> None:
        """Count the tokens of each expert, and set the imbalance to that of this reading."""
        for layer, counts in enumerate(tokens):
            for expert, count in enumerate(counts):
                self._count("expert_tokens", count, f"{layer}/{expert}")
        self._set_imbalance("expert_imbalance", tokens)

    def _count_ranks(self, tokens: list[list[int]]) -> None:
        """Count the tokens of each rank's experts, and set the imbalance to that of this reading."""
        for rank, counts in enumerate(zip(*tokens, strict=True)):
            self._count("expert_rank_tokens", sum(counts), str(rank))
        self._set_imbalance("expert_rank_imbalance", tokens)

    def _set_imbalance(self, name: str, tokens: list[list[int]]) -> None:
        """Set a gauge to the largest count of a layer over the mean of its counts, averaged over layers."""
        ratios = [max(counts) * len(counts) / sum(counts) for counts in tokens if any(counts)]
        if ratios:
            self._gauges[name] = sum(ratios) / len(ratios)

    def _count_tiers(self, tiers: list[tuple[str, int, int, int]]) -> None:
        """Count what the tiers did since the last reading. A new engine starts at zero."""
        for name, *counts in tiers:
            before, self._tiers[name] = self._tiers.get(name, [0, 0, 0]), counts
            if any(now < then for now, then in zip(counts, before, strict=True)):
                before = [0, 0, 0]
            for kind, now, then in zip(("stored", "loaded", "dropped"), counts, before, strict=True):
                self._count(f"kv_tier_{kind}_blocks", now - then, name)

    def _count_pins(self, pins: list[tuple[str, str, int]]) -> None:
        """Set the gauges of pins, and count their events since the last reading. A new engine starts at zero."""
        before, self._pins = self._pins, {(kind, reason): count for kind, reason, count in pins}
        for kind in ("blocks", "prefixes"):
            self._gauges[f"prompt_cache_pinned_{kind}"] = self._pins.pop((kind, ""))
        if any(self._pins.get(event, 0) < count for event, count in before.items()):
            before = {}
        for (kind, reason), count in self._pins.items():
            self._count(f"prompt_cache_pins_{kind}", count - before.get((kind, reason), 0), reason)

    def _count_drafts(self, step: StepRecord) -> None:
        """Count a step's drafts. A counter cannot fall, so lost seconds are subtracted from the next saved seconds."""
        for position, count in enumerate(step.accepted_at):
            self._count("spec_decode_num_accepted_tokens_per_pos", count, str(position))
        self._saved_s += step.saved_s
        if self._saved_s > 0:
            self._count("spec_decode_saved_seconds", self._saved_s)
            self._saved_s = 0.0

    def _set_gauges(self, step: StepRecord) -> None:
        """Set the gauges from the newest record."""
        gauges = self._gauges
        blocks = max(1, step.blocks_total)
        gauges["num_requests_running"] = step.running
        gauges["num_requests_waiting"] = step.waiting
        gauges["kv_cache_usage_perc"] = step.blocks_used / blocks
        gauges["kv_cache_cached_perc"] = step.blocks_cached / blocks
        gauges["kv_waste_inside_perc"] = step.waste_inside
        gauges["kv_waste_between_perc"] = step.waste_between

    def on_request(self, record: RequestRecord) -> None:
        """Add an ended request. One that was cut off counts only as aborted and in the ledger."""
        self.live.on_request(record)
        if record.batch:
            self._count("prompt_tokens_cached", 0 if record.cut else record.cached_tokens)
            return
        if record.cut:
            self.aborted(record.cut)
            return
        spent = record.spent
        observations: dict[str, float | None] = {
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
        for name, value in observations.items():
            if value is not None:
                self._histograms[name].add(value)
        self._count("prompt_tokens_cached", record.cached_tokens)
        for ttl, count in record.cache_writes.items():
            self._count("prompt_cache_write_tokens", count, ttl)
        for reason in record.finish_reasons:
            self._count("request_success", 1, reason)

    def aborted(self, reason: str) -> None:
        """Count a request that was refused or ended early. reason: "cancelled", "error", "overloaded", ..."""
        self._count("aborted_requests", 1, reason)

    def answer_looked_up(self, hit: bool, stored_bytes: int) -> None:
        """Count a lookup in the answer cache. stored_bytes: what it holds."""
        self._count("answer_cache_hits" if hit else "answer_cache_misses", 1)
        self._gauges["answer_cache_bytes"] = stored_bytes

    def judged(self, result: str) -> None:
        """Count a judgement of the moderation judge. result: "passed", "flagged" or "failed"."""
        self._count("moderation_judgements", 1, result)

    def batch_lane(self, queued: int, running: int, batches: int) -> None:
        """Set the gauges of the batch lane: rows that wait, rows in flight, batches that have not ended."""
        gauges = self._gauges
        gauges["batch_rows_queued"], gauges["batch_rows_running"], gauges["batches_open"] = queued, running, batches

    def batch_rows(self, completed: int, failed: int) -> None:
        """Count rows of batches that have a result."""
        self._count("batch_rows", completed, "completed")
        self._count("batch_rows", failed, "failed")

    def handed_over(self, seconds: float) -> None:
        """Count a prompt that another engine goes on with. seconds: from its ticket to the next token."""
        self._count("hand_overs", 1)
        self._count("hand_over_seconds", seconds)

    def pulled(self, size: int) -> None:
        """Count bytes that an engine pulled from others."""
        self._count("hand_over_bytes", size)

    def hand_over_failed(self, reason: str) -> None:
        """Count a prompt whose pages did not all arrive; they were computed."""
        self._count("hand_over_failures", 1, reason)

    def engine_restarted(self) -> None:
        """Count a restart of the engine, and the pinned prefixes that were lost with it."""
        self._flush()
        self._count("engine_restarts", 1)
        self._count("prompt_cache_pins_lost", self._gauges["prompt_cache_pinned_prefixes"], "restart")
        self._count_pins([("blocks", "", 0), ("prefixes", "", 0)])

    def shadowed(self, tokens: int, same: int, nats: float, mean_kl: float) -> None:
        """Add an answer that the reference model has scored.

        Args:
            tokens: Tokens of the answer.
            same: Tokens for which both models have the same most probable token.
            nats: KL divergence summed over the answer's tokens.
            mean: KL divergence per token over the last answers.
        """
        for name, amount in (("answers", 1), ("tokens", tokens), ("same_tokens", same), ("kl_nats", nats)):
            self._count(f"shadow_{name}", amount)
        self._gauges["shadow_kl"] = mean_kl

    def shadow_failed(self) -> None:
        self._count("shadow_failures", 1)

    # --- export -----------------------------------------------------------------------------------------------------

    def render(self) -> bytes:
        """Format all series as text of type CONTENT_TYPE, once per prefix."""
        self._flush()
        base = labelled(self._labels)
        lines = [*self._families(PREFIX, base), *self._live_families(base)]
        if self._alias is not None:
            lines += self._families(self._alias.prefix, base) if self._alias.stems else ()
            lines += self._renamed(self._alias, base)
        return "".join(lines).encode()

    def _families(self, prefix: str, base: str) -> Iterator[str]:
        """Format gauges, counters and histograms under a prefix."""
        for name, entry in _entries(GAUGES, prefix):
            yield gauge(f"{prefix}:{name}", entry.text, [(base, self._gauges[name])])
        for name, entry in _entries(COUNTERS, prefix):
            full_name = f"{prefix}:{name}_total"
            yield head(full_name, "counter", entry.text)
            for (counter, label), count in self._counters.items():
                if counter == name:
                    label_text = f",{labelled({entry.label: label})}" if entry.label else ""
                    yield sample(full_name, base + label_text, count)
        for name, entry in _entries(HISTOGRAMS, prefix):
            yield head(f"{prefix}:{name}", "histogram", entry.text)
            yield self._histograms[name].render_samples(f"{prefix}:{name}", base)
        if self._cache:
            yield gauge(f"{prefix}:cache_config_info", "The KV cache.", [(f"{base},{labelled(self._cache)}", 1.0)])

    def _renamed(self, alias: Alias, base: str) -> Iterator[str]:
        """Format the series that an alias renames. Gauges without a known value are left out."""
        values = self._gauges | self._derived() | self.live.figures()
        texts = {**DERIVED, **{name: entry.text for name, entry in (*GAUGES.items(), *LIVE.items())}}

        def labels_of(name: str) -> str:
            return f"{base},{labelled(alias.labels[name])}" if name in alias.labels else base

        for name, ours in alias.gauges.items():
            if ours in values:
                yield gauge(f"{alias.prefix}:{name}", texts[ours], [(labels_of(name), values[ours])])
        for name, ours in alias.counters.items():
            full_name = f"{alias.prefix}:{name}_total"
            yield head(full_name, "counter", COUNTERS[ours].text) + sample(
                full_name, labels_of(name), self._counters[ours, ""]
            )
        for name, ours in alias.histograms.items():
            full_name = f"{alias.prefix}:{name}"
            yield head(full_name, "histogram", HISTOGRAMS[ours].text) + self._histograms[ours].render_samples(
                full_name, base
            )

    def _derived(self) -> dict[str, float]:
        """Compute the gauges of aliases.DERIVED."""
        drafts = self._counters["spec_decode_num_drafts", ""]
        slots = float(self._cache.get("block_size", 0)) * float(self._cache.get("num_gpu_blocks", 0))
        gauges = {
            "used_tokens": self._gauges["kv_cache_usage_perc"] * slots,
            "preempted": self._counters["num_preemptions", ""],
            "swapped": 0.0,
        }
        if drafts:
            gauges["mean_accepted_length"] = 1 + self._counters["spec_decode_num_accepted_tokens", ""] / drafts
        return gauges

    def _live_families(self, base: str) -> Iterator[str]:
        """Format the live series: gauges, latencies by quantile, missed requests by cause, alerts and the calibration."""
        live = self.live

        def with_label(name: str, value: str) -> str:
            return f"{base},{labelled({name: value})}"

        figures = live.figures()
        for name, entry in LIVE.items():
            if name in figures:
                yield gauge(f"{PREFIX}:{name}", entry.text, [(base, figures[name])])
        latencies = [
            (f"{with_label('latency', latency)},{labelled({'quantile': f'{share:g}'})}", seconds)
            for latency, share, seconds in live.quantiles()
        ]
        blamed = [(with_label("blame", cause), float(count)) for cause, count in live.blamed().items()]
        alerts = [(with_label("rule", alert.rule), 1.0) for alert in live.history.alerts()]
        calibration = (
            [(with_label("calibration", live.ceilings.calibration or UNCALIBRATED), 1.0)] if self._cache else []
        )
        speeds = [(with_label("quantile", f"{share:g}"), speed) for share, speed in live.speeds().items()]
        runs = live.runs()
        of_runs = [
            [
                (with_label("quantile", f"{float(name[1:]) / 100:g}"), value)
                for name, value in runs.get(measure, {}).items()
            ]
            for measure in MEASURES
        ]
        families = (latencies, blamed, alerts, speeds, *of_runs, calibration)
        for name, samples in zip(FAMILIES, families, strict=True):
            yield gauge(f"{PREFIX}:{name}", FAMILIES[name], samples)

    def _count(self, name: str, amount: float, label: str = "") -> None:
        key = name, label
        self._counters[key] = self._counters.get(key, 0.0) + amount

    def _set_edges(self, max_len: int) -> None:
        self._max_len = max_len
        tokens = tuple(one_two_five(max_len))
        self._histograms = {name: Histogram(entry.edges or tokens) for name, entry in HISTOGRAMS.items()}


def _entries(catalogue: Mapping[str, Entry], prefix: str) -> Iterator[tuple[str, Entry]]:
    """Return the entries of a catalogue that exist under a prefix."""
    return ((name, entry) for name, entry in catalogue.items() if prefix == PREFIX or not entry.ours)
