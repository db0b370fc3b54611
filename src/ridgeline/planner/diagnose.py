"""Diagnosis of a running server: its bottleneck, its distance to the hardware limit, and remedies.

The rules are those of docs/diagnosis.md. A predicted gain is the share of the bottleneck's time that a remedy removes. It is an
upper bound from bytes and counts. It is NaN if the measurements do not determine it: apply the remedy and measure.
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
"""Share of busy time below which the device is not the bottleneck."""
FULL_ABOVE = 0.85
"""Share of used KV blocks above which waiting requests are assumed to wait for blocks."""
HOST_ABOVE = 0.15
"""Share of time that the device waits for the host, above which the host is the bottleneck."""
CLIENT_ABOVE = 0.3
"""Share of a median request spent outside of the engine, above which the client is the bottleneck."""
MIN_OUTSIDE_S = 0.05
"""Seconds outside of the engine below which the client is never the bottleneck."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Figures of a server over its last minutes. Shares are between 0 and 1, times are seconds, NaN means unknown."""

    running: float = 0.0
    waiting: float = 0.0
    max_running: float = UNKNOWN
    kv_used: float = 0.0
    kv_tokens: float = 0.0
    """Tokens in the KV cache that belong to running requests."""
    busy: float = 0.0
    bubble: float = 0.0
    prompt_share: float = 0.0
    hit_rate: float = UNKNOWN
    mfu: float = UNKNOWN
    mbu: float = UNKNOWN
    step_s: float = UNKNOWN
    step_bytes: float = UNKNOWN
    """Time and bytes (step_s, step_bytes) of a step without prompt tokens."""
    weight_bytes: float = 0.0
    kv_bytes_per_token: float = 0.0
    bandwidth: float = UNKNOWN
    e2e_s: float = UNKNOWN
    queue_s: float = UNKNOWN
    prefill_s: float = UNKNOWN
    tpot_s: float = UNKNOWN
    outside_s: float = UNKNOWN
    late_compile_s: float = 0.0
    """Time since start-up for compiling kernels and capturing graphs while requests waited."""
    client: str = ""
    """Evidence that the load generator itself was too slow; "" if there is none."""
    device: str = ""
    quantization: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def weight_share(self) -> float:
        """Share of weights in the bytes of a decode step. All requests share the weights."""
        total = self.weight_bytes + self.kv_tokens * self.kv_bytes_per_token
        return self.weight_bytes / total if total else UNKNOWN

    @property
    def bandwidth_share(self) -> float:
        """Share of the memory bandwidth that a decode step reaches. Launches, small kernels and the host take the remainder."""
        return self.step_bytes / self.step_s / self.bandwidth if self.step_s and self.bandwidth else UNKNOWN


def observe(snapshot: Mapping[str, Any], client: str = "") -> Observation:
    """Read an observation from GET /dashboard/data (service.insight.snapshot). client: see Observation."""
    now, figures, facts = snapshot["now"], snapshot["figures"], snapshot["facts"]
    ceilings, latencies = snapshot["ceilings"], snapshot["latencies"]
    blocks = facts.get("blocks", 0) * facts.get("page_tokens", 0)

    def median(name: str) -> float:
        return float(latencies.get(name, {}).get("p50", UNKNOWN))

    return Observation(
        running=figures.get("mean_running", now.get("running", 0.0)),
        waiting=now.get("waiting", 0.0),
        max_running=facts.get("max_num_seqs", UNKNOWN),
        kv_used=now.get("kv_used", 0.0),
        kv_tokens=now.get("kv_used", 0.0) * blocks * (1 - now.get("kv_waste_inside", 0.0)),
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
        bandwidth=ceilings.get("measured_bytes") or ceilings.get("bytes") or UNKNOWN,
        e2e_s=median("e2e"),
        queue_s=median("queue"),
        prefill_s=median("prefill"),
        tpot_s=median("tpot"),
        outside_s=median("outside"),
        late_compile_s=snapshot.get("late", {}).get("seconds", 0.0),
        client=client,
        device=facts.get("device", ""),
        quantization=facts.get("quantization", ""),
        options={**facts.get("options", {}), "steps_in_flight": facts.get("steps_in_flight")},
    )


@dataclass(frozen=True, slots=True)
class Cure:
    """One remedy."""

    name: str
    helps: tuple[Bottleneck, ...]
    """Bottlenecks that it relieves."""
    predict: Callable[[Observation], float | None]
    """Share of the bottleneck's time that it removes; None if it does not apply, NaN if unknown."""
    effort: str
    risk: str
    """Risk to the quality of answers."""
    command: str
    """Command that applies it."""
    trade: str
    """Disadvantage."""


def _fp8(observation: Observation) -> float | None:
    """Half of the time that a bandwidth-bound step spends on reading weights."""
    if observation.quantization or observation.device == "cpu":
        return None
    return (
        0.5
        * observation.weight_share
        * (observation.bandwidth_share if observation.bandwidth_share == observation.bandwidth_share else 0.8)
    )


def _fp8_prefill(observation: Observation) -> float | None:
    """Half of the compute time at the measured peak, because matrix products run at twice the rate."""
    return None if observation.quantization or observation.device == "cpu" else 0.5 * observation.mfu


def _more_rows(observation: Observation) -> float | None:
    """With twice the requests, a step reads twice the KV bytes but the same weights."""
    if observation.kv_used > FULL_ABOVE / 2 or not observation.running < 0.95 * observation.max_running * 2:
        return None
    return 0.5 * observation.weight_share if observation.waiting else None


def _prefix(observation: Observation) -> float | None:
    return None if observation.options.get("enable_prefix_caching", True) else UNKNOWN


def _smaller_chunks(observation: Observation) -> float | None:
    """Half of the time of steps with prompt tokens, which delay the next token of all requests."""
    return 0.5 * observation.prompt_share if observation.prompt_share > 0.3 and observation.waiting < 1 else None


def _longer_chunks(observation: Observation) -> float | None:
    return UNKNOWN if observation.prompt_share > 0.5 and observation.waiting >= 1 else None


def _more_cache(observation: Observation) -> float | None:
    share = observation.options.get("gpu_memory_utilization", 0.9)
    return (0.95 - share) / share if observation.device != "cpu" and share < 0.95 else None


def _fp8_cache(observation: Observation) -> float | None:
    """The KV cache can use the memory that smaller weights free."""
    if observation.quantization or not observation.kv_bytes_per_token:
        return None
    cache_bytes = observation.kv_tokens / max(observation.kv_used, 0.01) * observation.kv_bytes_per_token
    freed_bytes = 0.45 * observation.weight_bytes
    return freed_bytes / (cache_bytes + freed_bytes) if cache_bytes else None


def _overlap(observation: Observation) -> float | None:
    return (
        observation.bubble if observation.options.get("steps_in_flight") == 0 and observation.device != "cpu" else None
    )


def _graphs(observation: Observation) -> float | None:
    return 0.5 * observation.bubble if observation.options.get("enforce_eager") else None


def _replica(observation: Observation) -> float | None:
    """Each replica serves half of the requests, but reads all weights."""
    if observation.waiting >= 1:
        return 0.5
    return 0.5 * (1 - observation.weight_share) if observation.busy > 0.9 else None


def _faster_memory(observation: Observation) -> float | None:
    """Compared with the fastest memory in the hardware table. Applies only if bandwidth limits the step."""
    current = find(observation.device)
    if current is None or not observation.bandwidth_share > 0.5:
        return None
    best = max(accelerator.bandwidth for accelerator in ACCELERATORS if accelerator.kind == current.kind)
    return 1 - current.bandwidth / best if best > current.bandwidth else None


def _client(observation: Observation) -> float | None:
    return observation.outside_s / observation.e2e_s if observation.e2e_s else UNKNOWN if observation.client else None


_FP8_RISK = "small: docs/log/2026-11-21-fp8-quality-shipped-model.md reports it for the shipped model"
_FP8_DRIFT = "answers drift a little: measure it on your texts with `ridgeline compare`"
CURES: tuple[Cure, ...] = (
    Cure("8-bit weights", ("decode bandwidth",), _fp8, "a restart",
         _FP8_RISK,
         "ridgeline serve MODEL --quantization fp8", _FP8_DRIFT),
    Cure("8-bit products", ("prefill compute",), _fp8_prefill, "a restart", _FP8_RISK,
         "ridgeline serve MODEL --quantization fp8", _FP8_DRIFT),
    Cure("8-bit weights, more memory for KV", ("KV capacity",), _fp8_cache, "a restart", _FP8_RISK,
         "ridgeline serve MODEL --quantization fp8", _FP8_DRIFT),
    Cure("more requests at once", ("queue",), _more_rows, "a restart", "none",
         "ridgeline serve MODEL --max-num-seqs N (twice the current value)", "each request decodes a little slower"),
    Cure("prefix cache", ("prefill compute", "queue", "KV capacity"), _prefix, "a restart", "none",
         "ridgeline serve MODEL --enable-prefix-caching", "helps only if prompts share prefixes"),
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
         "ridgeline bench run --url URL (reports when the client is the limit)", "none"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Advice:
    """A remedy with its predicted gain."""

    gain: float
    """Share of the bottleneck's time that it removes; NaN: unknown."""
    cure: Cure


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The bottleneck of a server and its remedies."""

    bottleneck: Bottleneck
    evidence: tuple[str, ...]
    """Measurements that identify the bottleneck."""
    distance: tuple[str, ...]
    """Sentences about the distance to the hardware limit."""
    advice: tuple[Advice, ...]
    """Remedies, largest predicted gain first."""


def diagnose(observation: Observation) -> Diagnosis:
    """Apply the decision path of docs/diagnosis.md; the first match is the bottleneck."""
    name, evidence = _bottleneck(observation)
    advice = []
    for cure in CURES:
        gain = cure.predict(observation) if name in cure.helps else None
        if gain is not None and not gain <= 0.005:
            advice.append(Advice(gain, cure))
    return Diagnosis(
        name,
        tuple(evidence),
        tuple(_distance(observation)),
        tuple(sorted(advice, key=lambda item: -item.gain if item.gain == item.gain else 1.0)),
    )


def _bottleneck(observation: Observation) -> tuple[Bottleneck, list[str]]:
    busy = f"the device was busy {observation.busy:.0%} of the time"
    requests = f"{observation.waiting:.0f} waiting and {observation.running:.0f} running requests"
    if observation.client:
        return "client", [observation.client]
    if observation.waiting >= 1 and observation.kv_used >= FULL_ABOVE:
        return "KV capacity", [f"{requests}, and {observation.kv_used:.0%} of the KV cache is used"]
    if observation.waiting >= 1 and observation.running >= 0.95 * observation.max_running:
        return "queue", [
            f"{requests}: --max-num-seqs {observation.max_running:.0f} is reached, "
            f"and {observation.kv_used:.0%} of the KV cache is used"
        ]
    if observation.bubble >= HOST_ABOVE:
        return "host", [f"the device waited for the host {observation.bubble:.0%} of the time in which there was work"]
    if observation.outside_s > max(CLIENT_ABOVE * observation.e2e_s, MIN_OUTSIDE_S):
        return "client", [
            f"a request took {observation.e2e_s:.2f} s, {observation.outside_s:.2f} s of it outside of the engine"
        ]
    if observation.busy < IDLE_BELOW and observation.waiting < 1:
        return "none", [f"{busy} and no request waits: the server can take more load at the same speed"]
    if observation.prompt_share > 0.5:
        return "prefill compute", [f"{busy}, {observation.prompt_share:.0%} of that in steps that computed prompts"]
    return "decode bandwidth", [f"{busy}, {1 - observation.prompt_share:.0%} of that in steps that only decode"]


def _distance(observation: Observation) -> list[str]:
    sentences = []
    if observation.bandwidth_share == observation.bandwidth_share:
        floor = observation.step_bytes / observation.bandwidth
        sentences.append(
            f"A decode step takes {observation.step_s * 1e3:.2f} ms and moves {observation.step_bytes / 1e9:.2f} GB, "
            f"which takes at least {floor * 1e3:.2f} ms: it reaches {observation.bandwidth_share:.0%} of the bandwidth."
        )
    if observation.weight_share == observation.weight_share:
        sentences.append(
            f"{observation.weight_share:.0%} of these bytes are weights, which all running requests share. The others are KV cache."
        )
    if observation.mfu == observation.mfu:
        sentences.append(
            f"Over all time, the device reaches {observation.busy * observation.mfu:.0%} of its peak FLOP/s (MFU) and "
            f"{observation.busy * observation.mbu:.0%} of its bandwidth (MBU); while busy, {observation.mfu:.0%} and "
            f"{observation.mbu:.0%}."
        )
    if observation.late_compile_s:
        sentences.append(
            f"Since the start, {observation.late_compile_s:.2f} s were spent on kernels and graphs that start-up should have "
            "prepared. The log of the server names them."
        )
    return sentences
