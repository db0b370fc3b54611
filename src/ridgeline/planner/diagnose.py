"""From what a server measures to what holds it back, how far it is from the limit, and what to do about it.

The rules are those of docs/diagnosis.md. A gain is predicted as the share of time that a cure takes away from what is slow: a
bound by bytes and counts, not a promise. Where nothing that was measured says how much, it is NaN: try it and measure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ridgeline.hardware.table import ACCELERATORS, find

Bottleneck = Literal["none", "queue", "prefill compute", "decode bandwidth", "KV capacity", "host", "client"]
UNKNOWN = math.nan

IDLE_BELOW = 0.5
"""Share of time a device must be busy before it can be what holds a server back."""
FULL_ABOVE = 0.85
"""Share of KV blocks held from which waiting requests wait for blocks."""
HOST_ABOVE = 0.15
"""Share of time the device waits for the host from which the host is named."""
CLIENT_ABOVE = 0.3
"""Part of a median request spent outside of the engine from which its client is named."""
NOTICED_S = 0.05
"""Seconds outside of the engine below which nobody looks for a cause."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What a server said of its last minutes; NaN: unknown. Shares are 0 to 1, times seconds.

    held: tokens in the KV cache of running requests. step_s, step_bytes: of a step without prompt tokens. late_s: what
    kernels and graphs took since start-up that were made while requests waited. client: what shows that the load
    generator itself was too slow, "" for nothing.
    """

    running: float = 0.0
    waiting: float = 0.0
    most_running: float = UNKNOWN
    kv_used: float = 0.0
    held: float = 0.0
    busy: float = 0.0
    bubble: float = 0.0
    prompt_share: float = 0.0
    hit_rate: float = UNKNOWN
    mfu: float = UNKNOWN
    mbu: float = UNKNOWN
    step_s: float = UNKNOWN
    step_bytes: float = UNKNOWN
    weight_bytes: float = 0.0
    kv_bytes_per_token: float = 0.0
    bandwidth: float = UNKNOWN
    e2e_s: float = UNKNOWN
    queue_s: float = UNKNOWN
    prefill_s: float = UNKNOWN
    tpot_s: float = UNKNOWN
    outside_s: float = UNKNOWN
    late_s: float = 0.0
    client: str = ""
    device: str = ""
    quantization: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def weight_share(self) -> float:
        """Part of a decode step's bytes that are weights, which every request shares."""
        total = self.weight_bytes + self.held * self.kv_bytes_per_token
        return self.weight_bytes / total if total else UNKNOWN

    @property
    def reached(self) -> float:
        """Part of the bandwidth that a decode step reaches; what is missing is launches, small kernels, the host."""
        return self.step_bytes / self.step_s / self.bandwidth if self.step_s and self.bandwidth else UNKNOWN


def observe(snapshot: Mapping[str, Any], client: str = "") -> Observation:
    """From GET /dashboard/data (service.insight.snapshot). client: see Observation."""
    now, figures, facts = snapshot["now"], snapshot["figures"], snapshot["facts"]
    top, latencies = snapshot["ceilings"], snapshot["latencies"]
    blocks = facts.get("blocks", 0) * facts.get("page_tokens", 0)

    def median(name: str) -> float:
        return float(latencies.get(name, {}).get("p50", UNKNOWN))

    return Observation(
        running=figures.get("mean_running", now.get("running", 0.0)),
        waiting=now.get("waiting", 0.0),
        most_running=facts.get("max_num_seqs", UNKNOWN),
        kv_used=now.get("kv_used", 0.0),
        held=now.get("kv_used", 0.0) * blocks * (1 - now.get("kv_waste_inside", 0.0)),
        busy=figures.get("device_busy", 0.0),
        bubble=figures.get("bubble", 0.0),
        prompt_share=figures.get("prompt_share", 0.0),
        hit_rate=figures.get("prefix_hit_rate", UNKNOWN),
        mfu=figures.get("mfu_measured", figures.get("mfu", UNKNOWN)),
        mbu=figures.get("mbu_measured", figures.get("mbu", UNKNOWN)),
        step_s=figures.get("decode_step_seconds", UNKNOWN),
        step_bytes=figures.get("decode_step_bytes", UNKNOWN),
        weight_bytes=facts.get("weight_bytes", 0.0),
        kv_bytes_per_token=facts.get("kv_bytes_per_token", 0.0),
        bandwidth=top.get("measured_bytes") or top.get("bytes") or UNKNOWN,
        e2e_s=median("e2e"),
        queue_s=median("queue"),
        prefill_s=median("prefill"),
        tpot_s=median("tpot"),
        outside_s=median("outside"),
        late_s=snapshot.get("late", {}).get("seconds", 0.0),
        client=client,
        device=facts.get("device", ""),
        quantization=facts.get("quantization", ""),
        options={**facts.get("options", {}), "steps_in_flight": facts.get("steps_in_flight")},
    )


@dataclass(frozen=True, slots=True)
class Cure:
    """One thing to do. helps: the bottlenecks it is for. predict: the share of the slow part's time it takes away, None
    where it cannot apply. effort: what it takes. risk: to the quality of answers. command: what applies it."""

    name: str
    helps: tuple[Bottleneck, ...]
    predict: Callable[[Observation], float | None]
    effort: str
    risk: str
    command: str
    trade: str


def _fp8(seen: Observation) -> float | None:
    """Half of the weights' part of a bandwidth-bound step; of a compute-bound one, half of the products."""
    if seen.quantization or seen.device == "cpu":
        return None
    return 0.5 * seen.weight_share * (seen.reached if seen.reached == seen.reached else 0.8)


def _fp8_prefill(seen: Observation) -> float | None:
    """Products at twice the rate: half of the time that arithmetic takes at the measured peak."""
    return None if seen.quantization or seen.device == "cpu" else 0.5 * seen.mfu


def _more_rows(seen: Observation) -> float | None:
    """Weights are read once for all: with twice the requests a step grows by its KV part alone."""
    if seen.kv_used > FULL_ABOVE / 2 or not seen.running < 0.95 * seen.most_running * 2:
        return None
    return 0.5 * seen.weight_share if seen.waiting else None


def _prefix(seen: Observation) -> float | None:
    return None if seen.options.get("enable_prefix_caching", True) else UNKNOWN


def _smaller_chunks(seen: Observation) -> float | None:
    """Steps with prompts hold up everybody's next token: the part of time they take beyond a plain step."""
    return 0.5 * seen.prompt_share if seen.prompt_share > 0.3 and seen.waiting < 1 else None


def _longer_chunks(seen: Observation) -> float | None:
    return UNKNOWN if seen.prompt_share > 0.5 and seen.waiting >= 1 else None


def _more_cache(seen: Observation) -> float | None:
    share = seen.options.get("gpu_memory_utilization", 0.9)
    return (0.95 - share) / share if seen.device != "cpu" and share < 0.95 else None


def _fp8_cache_room(seen: Observation) -> float | None:
    """Halved weights leave their bytes to the KV cache."""
    if seen.quantization or not seen.kv_bytes_per_token:
        return None
    room = seen.held / max(seen.kv_used, 0.01) * seen.kv_bytes_per_token
    more = 0.45 * seen.weight_bytes
    return more / (room + more) if room else None


def _overlap(seen: Observation) -> float | None:
    return seen.bubble if seen.options.get("steps_in_flight") == 0 and seen.device != "cpu" else None


def _graphs(seen: Observation) -> float | None:
    return 0.5 * seen.bubble if seen.options.get("enforce_eager") else None


def _replica(seen: Observation) -> float | None:
    """Half of the requests each: half of everything but the weights, which each replica reads for itself."""
    if seen.waiting >= 1:
        return 0.5
    return 0.5 * (1 - seen.weight_share) if seen.busy > 0.9 else None


def _faster_memory(seen: Observation) -> float | None:
    """Against the fastest memory of the table, if the step is bound by bandwidth at all."""
    here = find(seen.device)
    if here is None or not seen.reached > 0.5:
        return None
    best = max(one.bandwidth for one in ACCELERATORS if one.kind == here.kind)
    return 1 - here.bandwidth / best if best > here.bandwidth else None


def _client(seen: Observation) -> float | None:
    return seen.outside_s / seen.e2e_s if seen.e2e_s else UNKNOWN if seen.client else None


CURES: tuple[Cure, ...] = (
    Cure("8-bit weights", ("decode bandwidth",), _fp8, "a restart",
         "small: `docs/log/2026-11-21-fp8-quality-shipped-model.md` has KL and loss on our model",
         "ridgeline serve MODEL --quantization fp8", "answers drift a little; check with your own text"),
    Cure("8-bit products", ("prefill compute",), _fp8_prefill, "a restart", "small, as above",
         "ridgeline serve MODEL --quantization fp8", "answers drift a little; check with your own text"),
    Cure("8-bit weights leave room for KV", ("KV capacity",), _fp8_cache_room, "a restart", "small, as above",
         "ridgeline serve MODEL --quantization fp8", "answers drift a little; check with your own text"),
    Cure("more requests at once", ("queue",), _more_rows, "a restart", "none",
         "ridgeline serve MODEL --max-num-seqs N (twice the present value)", "tokens of each request come a little slower"),
    Cure("prefix cache", ("prefill compute", "queue", "KV capacity"), _prefix, "a restart", "none",
         "ridgeline serve MODEL --enable-prefix-caching true", "helps only if prompts share prefixes"),
    Cure("smaller prompt chunks", ("prefill compute",), _smaller_chunks, "a restart", "none",
         "ridgeline serve MODEL --max-num-batched-tokens 2048", "steadier streams, later first tokens"),
    Cure("larger prompt chunks", ("prefill compute", "queue"), _longer_chunks, "a restart", "none",
         "ridgeline serve MODEL --max-num-batched-tokens 16384", "earlier first tokens, less steady streams"),
    Cure("more memory for the cache", ("KV capacity",), _more_cache, "a restart", "none",
         "ridgeline serve MODEL --gpu-memory-utilization 0.95", "less memory for other programs on the device"),
    Cure("plan while the device runs", ("host",), _overlap, "a restart", "none",
         "ridgeline serve MODEL --steps-in-flight 1", "one step is wasted when a request ends"),
    Cure("CUDA graphs", ("host",), _graphs, "a restart", "none",
         "ridgeline serve MODEL (without --enforce-eager)", "some seconds of start-up"),
    Cure("a second replica", ("queue", "KV capacity", "prefill compute", "decode bandwidth"), _replica, "another device",
         "none", "ridgeline serve MODEL --port 8001, behind any load balancer", "twice the price"),
    Cure("faster memory", ("decode bandwidth",), _faster_memory, "other hardware", "none",
         "ridgeline roofline MODEL --on b200 (and others)", "compare cost with `ridgeline calc cost`"),
    Cure("a closer or faster client", ("client",), _client, "outside of the server", "none",
         "ridgeline bench run --url URL (says when the client is the limit)", "none"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Advice:
    """A cure with its predicted gain: the share of the bottleneck's time that it takes away; NaN: not predicted."""

    gain: float
    cure: Cure


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """bottleneck and why it is that one; distance: sentences on how far the server is from the hardware's limit; advice: the
    largest predicted gain first."""

    bottleneck: Bottleneck
    evidence: tuple[str, ...]
    distance: tuple[str, ...]
    advice: tuple[Advice, ...]


def diagnose(seen: Observation) -> Diagnosis:
    """The decision path of docs/diagnosis.md, first match."""
    name, evidence = _bottleneck(seen)
    advice = []
    for cure in CURES:
        gain = cure.predict(seen) if name in cure.helps else None
        if gain is not None and not gain <= 0.005:
            advice.append(Advice(gain, cure))
    return Diagnosis(
        name,
        tuple(evidence),
        tuple(_distance(seen)),
        tuple(sorted(advice, key=lambda one: -one.gain if one.gain == one.gain else 1.0)),
    )


def _bottleneck(seen: Observation) -> tuple[Bottleneck, list[str]]:
    busy = f"the device was busy {seen.busy:.0%} of the time"
    waits = f"{seen.waiting:.0f} waiting and {seen.running:.0f} running requests"
    if seen.client:
        return "client", [seen.client]
    if seen.waiting >= 1 and seen.kv_used >= FULL_ABOVE:
        return "KV capacity", [f"{waits}, and {seen.kv_used:.0%} of the KV cache is used"]
    if seen.waiting >= 1 and seen.running >= 0.95 * seen.most_running:
        return "queue", [
            f"{waits}: --max-num-seqs {seen.most_running:.0f} is reached, and {seen.kv_used:.0%} of the KV cache is used"
        ]
    if seen.bubble >= HOST_ABOVE:
        return "host", [f"the device waited for the host {seen.bubble:.0%} of the time in which there was work"]
    if seen.outside_s > max(CLIENT_ABOVE * seen.e2e_s, NOTICED_S):
        return "client", [f"a request took {seen.e2e_s:.2f} s, {seen.outside_s:.2f} s of it outside of the engine"]
    if seen.busy < IDLE_BELOW and seen.waiting < 1:
        return "none", [f"{busy} and no request waits: the server can take more load at the same speed"]
    if seen.prompt_share > 0.5:
        return "prefill compute", [f"{busy}, {seen.prompt_share:.0%} of that in steps that computed prompts"]
    return "decode bandwidth", [f"{busy}, {1 - seen.prompt_share:.0%} of that in steps that only decode"]


def _distance(seen: Observation) -> list[str]:
    found = []
    if seen.reached == seen.reached:
        floor = seen.step_bytes / seen.bandwidth
        found.append(
            f"A decode step takes {seen.step_s * 1e3:.2f} ms and has {seen.step_bytes / 1e9:.2f} GB to move, which takes at least "
            f"{floor * 1e3:.2f} ms: it reaches {seen.reached:.0%} of the bandwidth."
        )
    if seen.weight_share == seen.weight_share:
        found.append(
            f"{seen.weight_share:.0%} of these bytes are weights, shared by all running requests; the rest is KV cache."
        )
    if seen.mfu == seen.mfu:
        found.append(
            f"While busy, the device reaches {seen.mfu:.0%} of its peak FLOP/s (MFU) and {seen.mbu:.0%} of its bandwidth (MBU)."
        )
    if seen.late_s:
        found.append(
            f"Since the start, {seen.late_s:.2f} s were spent on kernels and graphs that start-up should have prepared. The "
            "log of the server names them."
        )
    return found
