"""Ranks parallel layouts of a model for a load: throughput, latency, price, objectives, and why one comes before another.

The arithmetic of a steady state. A replica that holds B requests spends P seconds on each prompt and D seconds on each decode
step of B tokens. A request of O output tokens then takes P + O x D / B seconds of the replica, and its tokens come D / (1 - r x P)
seconds apart at r requests per second, because prompts take the share r x P of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace

from ridgeline.core.config import EngineConfig
from ridgeline.core.cost import CostModel
from ridgeline.core.errors import ConfigError
from ridgeline.core.sizing import GIB
from ridgeline.core.slo import NO_SLO, Latencies, Slo
from ridgeline.core.spec import ModelSpec
from ridgeline.planner.cluster import Cluster
from ridgeline.planner.cost import usd_per_unit
from ridgeline.planner.expert_times import imbalance
from ridgeline.planner.layout_times import Parts, Times
from ridgeline.planner.layouts import Layout, RankMemory, layouts, replica


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests to plan for. input, output: tokens of a request. rate: requests per second of the whole service; None: as many as
    the layout can serve within the objectives."""

    input: int = 1024
    output: int = 256
    rate: float | None = None
    slo: Slo = NO_SLO

    @property
    def length(self) -> int:
        return self.input + self.output


@dataclass(frozen=True, slots=True)
class Variant:
    """A model in a number format, and its cost model on one device. transferred: the factors of the cost model were measured on the
    device with another model or number format."""

    spec: ModelSpec
    cost: CostModel
    transferred: bool = False

    @property
    def basis(self) -> str:
        """What its step times rest on. Uncalibrated: on the figures of data sheets."""
        return "calibrated" if self.cost.calibrated else "transferred" if self.transferred else "uncalibrated"

    @property
    def name(self) -> str:
        weights, cache = self.spec.quantization or self.spec.dtype, self.spec.kv_format
        return f"{weights}, {cache} cache" if cache else weights


@dataclass(frozen=True, slots=True)
class Ranked:
    """A layout that fits, with its predicted figures.

    batch: requests that a replica holds at once. prefill_s: a prompt alone. ttft_s: with the wait for a running step and, at a
    rate, for other prompts. requests_s: of the service; at a rate, the rate. capacity: requests per second that it could serve
    within the objectives. parts: seconds of a device per request. verdict: the objective that is missed, or
    "". imbalance: tokens of the rank whose whole experts get most in a decode step, in means; 1 without such experts.
    """

    layout: Layout
    variant: Variant
    memory: RankMemory
    batch: int
    prefill_s: float
    ttft_s: float
    tpot_s: float
    requests_s: float
    capacity: float
    parts: Parts
    verdict: str
    usd_hour: float
    output: int
    imbalance: float = 1.0

    @property
    def e2e_s(self) -> float:
        return self.ttft_s + (self.output - 1) * self.tpot_s

    @property
    def tokens_s(self) -> float:
        """Output tokens per second of the service."""
        return self.requests_s * self.output

    @property
    def tokens_s_device(self) -> float:
        return self.tokens_s / self.layout.devices

    @property
    def usd_million(self) -> float:
        """Dollars per million output tokens; NaN without a price."""
        return usd_per_unit(self.usd_hour, self.tokens_s) * 1e6 if self.tokens_s else math.nan

    @property
    def binds(self) -> str:
        """What takes most of a device's time."""
        return max(NAMES, key=lambda name: getattr(self.parts, name))

    def share(self, name: str) -> float:
        return getattr(self.parts, name) / self.parts.total  # type: ignore[no-any-return]


NAMES = {part.name: part.name for part in fields(Parts)} | {"memory": "memory bandwidth", "overhead": "the host"}
"""Parts of a device's time, and their names in words."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A layout that cannot be, and why."""

    layout: Layout
    variant: Variant
    reason: str


def rank(
    variants: Iterable[Variant],
    cluster: Cluster,
    demand: Demand,
    engine: EngineConfig,
    sizes: Callable[[Layout], bool],
) -> tuple[list[Ranked], list[Refused]]:
    """All layouts of all variants: those that fit, best first, and those that cannot be.

    sizes: which layouts to consider. Order: objectives met; then requests per second that can be served; then fewer devices in a
    replica, because it is simpler and a failure takes less away.
    """
    ranked, refused = list[Ranked](), list[Refused]()
    for variant in variants:
        for layout in filter(sizes, layouts(cluster.count, has_experts(variant.spec))):
            try:
                ranked.append(evaluate(variant, layout, cluster, demand, engine))
            except ConfigError as error:
                if error.param:  # an option is wrong, whatever the layout
                    raise
                refused.append(Refused(layout, variant, error.message))
    ranked.sort(key=lambda entry: (bool(entry.verdict), _order(entry, demand), entry.layout.replica))
    return ranked, refused


def _order(entry: Ranked, demand: Demand) -> float:
    """Smaller is better. Where objectives are missed, by how much of the time."""
    if not entry.verdict:
        return -entry.capacity
    limits = demand.slo.limits()
    values = {"ttft": entry.ttft_s, "publish": entry.ttft_s, "tpot": entry.tpot_s, "e2e": entry.e2e_s}
    return max((values[name] / limit for name, limit in limits.items() if limit is not None), default=-entry.capacity)


def evaluate(variant: Variant, layout: Layout, cluster: Cluster, demand: Demand, engine: EngineConfig) -> Ranked:
    """Predicted figures of one layout. Raises ConfigError whose message is the reason if it cannot be."""
    made = replica(variant.spec, layout, cluster, demand.length, engine)
    times = Times(made, variant.cost)
    prefill_s, prompt = times.prefill(demand.input)
    load = ReplicaLoad(times, prompt, demand)
    most = min(made.memory.requests, made.rows * layout.pipeline)
    largest = load.largest(most, prefill_s)
    capacity = layout.data * load.rate(largest)
    batch, rate, wait = largest, load.rate(largest), 0.0
    if demand.rate is not None and demand.rate < capacity:
        rate = demand.rate / layout.data
        batch, wait = load.needed(rate, largest), load.wait(rate)
    ttft = prefill_s + wait + times.step_s(batch, load.context)
    ranked = Ranked(
        layout, variant, made.memory, batch, prefill_s, ttft, load.tpot(batch, rate), rate * layout.data, capacity,
        load.parts(batch), "", cluster.usd_hour, demand.output, _imbalance(variant.spec, layout, batch),
    )  # fmt: skip
    return replace(ranked, verdict=_verdict(ranked, demand))


def has_experts(spec: ModelSpec) -> bool:
    return any(layer.experts is not None for layer in spec.layers)


def _imbalance(spec: ModelSpec, layout: Layout, batch: int) -> float:
    """Of the layer with the largest one, in a decode step of `batch` requests in all stages together."""
    experts = {layer.experts for layer in spec.layers if layer.experts is not None}
    rows = -(-batch // min(layout.pipeline, batch))
    return max((imbalance(rows, kind, layout.experts) for kind in experts), default=1.0)


def _verdict(ranked: Ranked, demand: Demand) -> str:
    if demand.rate is not None and demand.rate > ranked.capacity:
        return f"{ranked.capacity:.3g} requests/s < {demand.rate:g}"
    return demand.slo.verdict(Latencies(ranked.ttft_s, ranked.ttft_s, ranked.tpot_s, ranked.e2e_s))


class ReplicaLoad:
    """A replica under a load of equal requests. prompt: seconds of a device that a prompt takes."""

    def __init__(self, times: Times, prompt: Parts, demand: Demand) -> None:
        self._times, self._prompt, self._demand = times, prompt, demand
        self.context = demand.input + demand.output // 2
        """Tokens that a request holds on average while it decodes."""

    def _decode(self, batch: int) -> Parts:
        return self._times.decode(batch, self.context)

    def rate(self, batch: int) -> float:
        """Requests per second of a replica that always holds `batch` requests."""
        return 1 / (self._prompt.total + self._demand.output * self._decode(batch).total / batch)

    def tpot(self, batch: int, rate: float) -> float:
        """Seconds per token of a replica that serves `rate` requests per second."""
        return self._decode(batch).total / (1 - rate * self._prompt.total)

    def largest(self, most: int, prefill_s: float) -> int:
        """The largest batch up to `most` with which the objectives are kept; 1 if none does."""
        low, high = (most, most) if self._keeps(most, prefill_s) else (1, most - 1)
        while low < high:
            middle = (low + high + 1) // 2
            if self._keeps(middle, prefill_s):
                low = middle
            else:
                high = middle - 1
        return low

    def _keeps(self, batch: int, prefill_s: float) -> bool:
        ttft, tpot = prefill_s + self._times.step_s(batch, self.context), self.tpot(batch, self.rate(batch))
        latencies = Latencies(ttft, ttft, tpot, ttft + (self._demand.output - 1) * tpot)
        return not self._demand.slo.verdict(latencies)

    def needed(self, rate: float, most: int) -> int:
        """Requests that a replica holds at `rate` requests per second: the smallest batch that serves them (Little's law)."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if self.rate(middle) >= rate:
                high = middle
            else:
                low = middle + 1
        return low

    def wait(self, rate: float) -> float:
        """Mean seconds that a prompt waits for others: one at a time, Poisson arrivals, equal times (M/D/1)."""
        busy = rate * self._prompt.total
        return busy * self._prompt.total / (2 * (1 - busy))

    def parts(self, batch: int) -> Parts:
        """Seconds of a device per request."""
        return self._prompt.plus(self._decode(batch), self._demand.output / batch)


def why(better: Ranked, worse: Ranked) -> str:
    """A sentence that says what puts one layout before another."""
    names = f"{_name(better, worse)} before {_name(worse, better)}:"
    if worse.verdict and not better.verdict:
        return f"{names} it keeps the objectives, the other misses {worse.verdict}."
    gain = better.capacity / worse.capacity
    if worse.verdict and gain < 1.005:
        return f"{names} it misses the objectives by less ({better.verdict}, the other {worse.verdict})."
    if gain < 1.02:
        return f"{names} nearly equal throughput ({gain:.3f} times), closer than such predictions are."
    more = {name: _device_s(worse, name) - _device_s(better, name) for name in NAMES}
    part = max(more, key=lambda name: more[name])
    short, long = (seconds_text(_device_s(layout, part)) for layout in (better, worse))
    cause = f"of {NAMES[part]}: {short} instead of {long} of devices per request"
    if better.batch * better.layout.data > 1.2 * worse.batch * worse.layout.data:
        cause += f"; it holds {better.batch * better.layout.data:,} requests at once instead of {worse.batch * worse.layout.data:,}"
    for entry, other in ((better, worse), (worse, better)):
        if entry.imbalance > 1:
            cause += f"; the busiest rank of {_name(entry, other)} has {entry.imbalance:.2f} times the mean tokens of experts"
    return f"{names} {gain:.2f} times the throughput, because {cause}."


def _device_s(ranked: Ranked, name: str) -> float:
    """Seconds of all devices of a replica that a request takes for a part."""
    return float(getattr(ranked.parts, name)) * ranked.layout.replica


def _name(ranked: Ranked, other: Ranked) -> str:
    same = ranked.variant == other.variant
    return str(ranked.layout) if same else f"{ranked.layout} ({ranked.variant.name})"


def seconds_text(seconds: float) -> str:
    """A time with three digits, in s or ms."""
    return f"{seconds:,.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def reasons(refused: Sequence[Refused]) -> list[tuple[str, list[Refused]]]:
    """Refused layouts by reason, those of the most layouts first."""
    groups: dict[str, list[Refused]] = {}
    for entry in refused:
        groups.setdefault(entry.reason, []).append(entry)
    return sorted(groups.items(), key=lambda item: -len(item[1]))


def expanded_notes(ranked: Sequence[Ranked]) -> list[str]:
    """What the weights of layouts count for linears that a device has in both forms (core.gpu_blocks)."""
    notes = []
    for entry in ranked:
        if size := entry.memory.expanded_bytes:
            linears = f"{size / GIB:.1f} GiB of quantized linears in {entry.variant.spec.dtype} too"
            notes.append(f"Weights of {entry.layout} include {linears}, for steps of many tokens.")
    return list(dict.fromkeys(notes))
