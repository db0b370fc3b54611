"""Names the bottleneck of a running server, and its distance to the hardware limit, by the rules of docs/diagnosis.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ridgeline.core.gpu_blocks import most_rows
from ridgeline.core.workload import endless_cache
from ridgeline.planner.situation import blocked_share, cached_share, newest, workload_of

Bottleneck = Literal[
    "none", "queue", "small batch", "KV capacity", "host", "client", "drafts", "prefix misses", "prompts delay decoding",
    "prefill compute", "decode bandwidth",
]  # fmt: skip
UNKNOWN = math.nan

IDLE_BELOW = 0.5
"""Share of busy time below which the device is not the bottleneck."""
FULL_ABOVE = 0.85
"""Share of used KV blocks above which waiting requests are assumed to wait for blocks."""
USED_ABOVE = 0.3
"""The same where requests wait although rows are free. Admission needs blocks for a whole prompt, so it may leave many free."""
HOST_ABOVE = 0.15
"""Share of time that the device waits for the host, above which the host is the bottleneck."""
LAUNCHED_BELOW = 0.5
"""Share of the bandwidth that a decode step reaches, below which launches without graphs take most of its time."""
CLIENT_ABOVE = 0.3
"""Share of a median request spent outside of the engine, above which the client is the bottleneck."""
MIN_OUTSIDE_S = 0.05
"""Seconds outside of the engine below which the client is never the bottleneck."""
REACHED = 0.85
"""Share of max_num_seqs that runs on average when the limit is reached; requests leave before others enter."""
QUEUE_ABOVE = 0.2
"""Share of a median request spent in the queue, above which requests are said to wait."""
DRAFT_LOSS = -0.05
"""Share of the device time that drafts save, below which they are the bottleneck."""
MISSED_ABOVE = 0.3
"""Share of prompt tokens that repeat earlier prompts of the record and were computed all the same."""
BLOCKED_ABOVE = 0.3
"""Share of a request's decoding time in steps with prompt tokens, above which prompts delay decoding."""
LONG_STEP = 4.0
"""Time of a step with prompt tokens, in steps without, above which it is felt as a pause."""


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
    mfu: float = UNKNOWN
    mbu: float = UNKNOWN
    step_s: float = UNKNOWN
    step_bytes: float = UNKNOWN
    """Time and bytes (step_s, step_bytes) of a step without prompt tokens."""
    weight_bytes: float = 0.0
    kv_bytes_per_token: float = 0.0
    bandwidth: float = UNKNOWN
    """Read bandwidth that the server measured when it started. Steps may exceed it: see `limit`."""
    published: float = UNKNOWN
    """Bandwidth by the specification of the device."""
    e2e_s: float = UNKNOWN
    queue_s: float = UNKNOWN
    prefill_s: float = UNKNOWN
    outside_s: float = UNKNOWN
    late_compile_s: float = 0.0
    """Time since start-up for compiling kernels and capturing graphs while requests waited."""
    client: str = ""
    """Evidence that the load generator itself was too slow; "" if there is none."""
    shared: float = UNKNOWN
    """Share of the prompt tokens of the recorded requests that an unlimited prefix cache would hold."""
    cached: float = UNKNOWN
    """Share of the prompt tokens of the recorded requests that came from the prefix cache."""
    blocked: float = UNKNOWN
    """Share of a median request's decoding time in steps with prompt tokens."""
    saved: float = 0.0
    """Device time that drafts saved, as a share of the device time. Below 0: they cost more than they saved."""
    prompt_step_s: float = UNKNOWN
    """Time of a step with prompt tokens."""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def weight_share(self) -> float:
        """Share of weights in the bytes of a decode step. All requests share the weights."""
        total = self.weight_bytes + self.kv_tokens * self.kv_bytes_per_token
        return self.weight_bytes / total if total else UNKNOWN

    @property
    def reached(self) -> float:
        """Bytes per second of a decode step."""
        return self.step_bytes / self.step_s if self.step_s else UNKNOWN

    @property
    def limit(self) -> float:
        """Bandwidth that decode steps do not exceed: the measured one, or else the published one. Unknown if they exceed both."""
        return next((rate for rate in (self.bandwidth, self.published) if rate >= self.reached), UNKNOWN)

    @property
    def bandwidth_share(self) -> float:
        """Share of the memory bandwidth that a decode step reaches. Launches, small kernels and the host take the remainder."""
        return self.reached / self.limit if self.limit else UNKNOWN

    @property
    def decoding(self) -> float:
        """Share of a median request that passes after its first token."""
        return 1 - (self.queue_s + self.prefill_s + self.outside_s) / self.e2e_s

    @property
    def queues(self) -> bool:
        """Whether requests wait for admission."""
        return self.waiting >= 1 or self.queue_s > QUEUE_ABOVE * self.e2e_s


def observe(snapshot: Mapping[str, Any], rows: Sequence[Mapping[str, Any]] = (), client: str = "") -> Observation:
    """Read an observation from GET /dashboard/data (service.insight.snapshot).

    rows: ended requests (GET /requests). client: see Observation.
    """
    ended = newest(rows)
    now, figures, facts = snapshot["now"], snapshot["figures"], snapshot["facts"]
    ceilings, latencies = snapshot["ceilings"], snapshot["latencies"]
    blocks = facts.get("blocks", 0) * facts.get("page_tokens", 0)
    running, weights = max(figures.get("mean_running", 0.0), now.get("running", 0.0)), facts.get("weight_bytes", 0.0)
    if running > most_rows([facts.get("quantization", "")]):
        weights = max(weights, facts.get("expanded_bytes", 0.0))  # linears in both forms

    def median(name: str) -> float:
        return float(latencies.get(name, {}).get("p50", UNKNOWN))

    # Requests that were admitted together end together, so a single step may show an empty cache.
    kv_used = max(now.get("kv_used", 0.0), figures.get("mean_kv_used", 0.0))
    return Observation(
        running=running,
        waiting=now.get("waiting", 0.0),
        max_running=facts.get("max_num_seqs", UNKNOWN),
        kv_used=kv_used,
        kv_tokens=kv_used * blocks * (1 - now.get("kv_waste_inside", 0.0)),
        busy=figures.get("device_busy", 0.0),
        bubble=figures.get("bubble", 0.0),
        prompt_share=figures.get("prompt_share", 0.0),
        mfu=_utilization(figures, "mfu"),
        mbu=_utilization(figures, "mbu"),
        step_s=figures.get("decode_step_seconds", UNKNOWN),
        step_bytes=figures.get("decode_step_bytes", UNKNOWN),
        weight_bytes=weights,
        kv_bytes_per_token=facts.get("kv_bytes_per_token", 0.0),
        bandwidth=ceilings.get("measured_bytes") or UNKNOWN,
        published=ceilings.get("bytes") or UNKNOWN,
        e2e_s=median("e2e"),
        queue_s=median("queue"),
        prefill_s=median("prefill"),
        outside_s=median("outside"),
        late_compile_s=snapshot.get("late", {}).get("seconds", 0.0),
        client=client,
        shared=endless_cache(workload_of(ended).requests)["endless_cache_tokens"],
        cached=cached_share(ended),
        blocked=blocked_share(ended),
        saved=figures.get("draft_saved_share", 0.0),
        prompt_step_s=figures.get("prompt_step_seconds", UNKNOWN),
        options=facts.get("options", {}),
    )


def _utilization(figures: Mapping[str, float], name: str) -> float:
    """The share of the measured peak, or else of the published one. Unknown if steps exceed both: then neither is a peak."""
    shares = (figures.get(key, UNKNOWN) for key in (f"{name}_measured", name))
    return next((share for share in shares if share < 1), UNKNOWN)


Finding = tuple[Bottleneck, tuple[str, ...]]
"""A bottleneck and the measurements that identify it."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The bottleneck of a server. distance: sentences about the distance to the hardware limit."""

    bottleneck: Bottleneck
    evidence: tuple[str, ...]
    distance: tuple[str, ...]


def diagnose(observation: Observation) -> Diagnosis:
    """Follow the decision path of docs/diagnosis.md; the first match is the bottleneck."""
    finding = _outside(observation) or _waiting(observation) or _running(observation)
    return Diagnosis(*finding, _distance(observation))


def _outside(observation: Observation) -> Finding | None:
    """Whether requests wait for blocks, or the device for others."""
    if observation.client:
        return "client", (observation.client,)
    if observation.queues and observation.kv_used >= FULL_ABOVE:
        return "KV capacity", (f"{_load(observation)}, and {observation.kv_used:.0%} of the KV cache is used",)
    if observation.outside_s > max(CLIENT_ABOVE * observation.e2e_s, MIN_OUTSIDE_S):
        seconds = f"a request took {observation.e2e_s:.2f} s, {observation.outside_s:.2f} s of it outside of the engine"
        return "client", (seconds,)
    if observation.bubble >= HOST_ABOVE:
        return "host", (f"the device waited for the host {observation.bubble:.0%} of the time in which there was work",)
    if observation.options.get("enforce_eager") and observation.bandwidth_share < LAUNCHED_BELOW:
        share = f"{observation.bandwidth_share:.0%}"
        return "host", (
            f"kernels are launched one by one (--enforce-eager): a decode step reaches {share} of the bandwidth",
        )
    return None


def _waiting(observation: Observation) -> Finding | None:
    """Whether requests wait for rows."""
    if not observation.queues:
        return None
    load, policy = _load(observation), observation.options.get("batching", "continuous")
    if policy != "continuous":
        return "queue", (f"{load}: --batching {policy} admits none before the batch has ended",)
    used = f"{observation.kv_used:.0%} of the KV cache is used"
    if observation.running < REACHED * observation.max_running:
        short = f"{load} of at most {observation.max_running:.0f}, and {used}: the next request does not fit"
        limited = observation.kv_used >= USED_ABOVE and observation.prompt_share < 0.5
        return ("KV capacity", (short,)) if limited else None
    reached = f"{load}: --max-num-seqs {observation.max_running:.0f} is reached, and {used}"
    if observation.weight_share > 0.5 and observation.kv_used < FULL_ABOVE / 2:
        shared = f"{observation.weight_share:.0%} of the bytes of a step are weights, which more requests would share"
        return "small batch", (reached, shared)
    return "queue", (reached,)


def _running(observation: Observation) -> Finding:
    """What the device does."""
    busy, prompts = f"the device was busy {observation.busy:.0%} of the time", f"{observation.prompt_share:.0%}"
    if observation.saved < DRAFT_LOSS:
        return "drafts", (f"drafts cost {-observation.saved:.0%} of the device time more than they saved",)
    if observation.prompt_share > BLOCKED_ABOVE and observation.shared - observation.cached > MISSED_ABOVE:
        repeated = f"{observation.shared:.0%} of the prompt tokens repeat earlier prompts"
        return "prefix misses", (
            f"{busy}, {prompts} of that in steps that computed prompts",
            f"{repeated}, but {observation.cached:.0%} came from the cache",
        )
    pauses = observation.prompt_step_s > LONG_STEP * observation.step_s
    if pauses and observation.blocked > BLOCKED_ABOVE and observation.decoding > 0.5:
        return "prompts delay decoding", (
            f"a request spends {observation.blocked:.0%} of its decoding in steps that compute prompts of others, which take "
            f"{observation.prompt_step_s * 1e3:.1f} ms instead of {observation.step_s * 1e3:.1f} ms",
        )
    if observation.busy < IDLE_BELOW and not observation.queues:
        return "none", (f"{busy} and no request waits: the server can take more load at the same speed",)
    if observation.prompt_share > 0.5:
        return "prefill compute", (f"{busy}, {prompts} of that in steps that computed prompts",)
    decoding = f"{busy}, {1 - observation.prompt_share:.0%} of that in steps that only decode"
    if observation.bandwidth_share < LAUNCHED_BELOW:
        return "decode bandwidth", (
            decoding,
            f"but these steps reach {observation.bandwidth_share:.0%} of the bandwidth: arithmetic, small kernels, or other "
            "processes on the machine take the remainder",
        )
    return "decode bandwidth", (decoding,)


def _load(observation: Observation) -> str:
    return f"{observation.waiting:.0f} waiting and {observation.running:.0f} running requests"


def _distance(observation: Observation) -> tuple[str, ...]:
    """Sentences about the distance to the hardware limit."""
    sentences = []
    if observation.reached == observation.reached:
        sentences.append(_decode_step(observation))
    if observation.weight_share == observation.weight_share:
        sentences.append(
            f"{observation.weight_share:.0%} of these bytes are weights, which all running requests share, and "
            f"{1 - observation.weight_share:.0%} are KV cache."
        )
    peaks = (("peak FLOP/s (MFU)", observation.mfu), ("bandwidth (MBU)", observation.mbu))
    if known := [(name, share) for name, share in peaks if share == share]:
        over_all = " and ".join(f"{observation.busy * share:.0%} of its {name}" for name, share in known)
        sentences.append(
            f"Over all time, the device reaches {over_all}; while busy, {' and '.join(f'{share:.0%}' for _, share in known)}."
        )
    if observation.late_compile_s:
        sentences.append(
            f"Since the start, {observation.late_compile_s:.2f} s were spent on kernels and graphs that start-up should have "
            "prepared. The log of the server names them."
        )
    return tuple(sentences)


def _decode_step(observation: Observation) -> str:
    """What a decode step reaches of the bandwidth. A measured one that it exceeds is no limit, and the sentences say why."""
    step, rate, limit = observation.step_bytes, observation.bandwidth, observation.limit
    text = f"A decode step takes {observation.step_s * 1e3:.2f} ms and moves {step / 1e9:.3g} GB"
    known = (
        f"takes at least {step / limit * 1e3:.2f} ms: it reaches {observation.bandwidth_share:.0%} of the bandwidth."
    )
    if limit == rate:
        return f"{text}, which {known}"
    text += f", {observation.reached / 1e9:.3g} GB/s."
    if rate == rate:
        text += (
            f" That is more than the {rate / 1e9:.3g} GB/s measured when the server started: other processes used the machine "
            "then, or the weights stay in a cache of the processor."
        )
    if limit == limit:
        return f"{text} By the published {limit / 1e9:.3g} GB/s it {known}"
    remedy = ": restart the server while the machine is idle, which measures the limit again" if rate == rate else ""
    return f"{text} The distance to the limit is not known{remedy}."
