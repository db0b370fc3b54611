"""Input of the metrics: one record per step, and one per request with the server's load around it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ridgeline.core.events import LateWork
from ridgeline.core.slo import NO_SLO, Latencies, Slo
from ridgeline.core.token_prices import Billable


class StepRecord(Protocol):
    """The record of one step (wire.messages.StepStats). Times in seconds, counts in tokens, requests and blocks."""

    running: int
    waiting: int
    prompt_tokens: int
    output_tokens: int
    drafted: int
    accepted: int
    preempted: int
    prefix_queries: int
    prefix_hits: int
    blocks_used: int
    blocks_cached: int
    blocks_total: int
    waste_inside: float
    waste_between: float
    host_s: float
    device_s: float
    steps: int
    """1, or 0 if no step ran and only the number of requests changed."""
    failed: int
    plan_s: float
    commit_s: float
    reply_s: float
    """plan_s, commit_s and reply_s add up to host_s. reply_s is that of the previous record."""
    dropped: int
    """Tokens sampled for choices that had already ended."""
    flops: float
    """Operations of the step's query tokens by the model's formula."""
    bytes: float
    """Bytes that the step must move: stored weights once, keys and values read and written."""
    predicted_s: float
    """device_s as predicted by the cost model."""
    idle_s: float
    """Seconds that the device waited for this step although there was work (the bubble)."""
    joules: float
    """Energy since the last record with joules above 0. 0 in most records."""
    drafts: int
    accepted_at: list[int]
    """Accepted draft tokens by their position in the draft."""
    saved_s: float
    """Seconds saved compared with steps without drafts. Below 0 if drafts cost more than they saved."""
    late: list[LateWork]
    """Kernels compiled and graphs captured since the previous record, while requests waited."""
    useful_flops: float
    """The part of `flops` for tokens that were committed and had not been computed before a preemption."""
    draft_flops: float
    draft_bytes: float
    """Operations and bytes moved of the drafter on the device."""
    prompt_joules: float
    output_joules: float
    """Energy of the steps since the last reading, by their query tokens. The remainder of `joules` is idle power."""
    metered_s: float
    """Device seconds of the steps that prompt_joules and output_joules belong to."""
    expert_tokens: list[list[int]]
    """Tokens of each expert, by layer with experts, since the last record that has them. Empty in most records."""
    tiers: list[tuple[str, int, int, int]]
    """Each tier below the KV cache: its name, and the blocks stored, loaded and dropped since the start. Empty in most records."""
    pins: list[tuple[str, str, int]]
    """Pinned prefixes and the events of pins (kv.pins.Pins.readings). Empty in most records."""
    rank_tokens: list[list[int]]
    """The part of expert_tokens that each rank computes, by layer, with --expert-parallel."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all steps so far. The difference of two is the work between them."""

    steps: int = 0
    device_s: float = 0.0
    mixed_s: float = 0.0
    """Device seconds of steps with prompt tokens."""
    host_s: float = 0.0
    row_s: float = 0.0
    """Device seconds times running requests, summed over steps."""
    step_joules: float = 0.0
    metered_s: float = 0.0
    """Energy of steps, and the device seconds of these steps."""

    @property
    def watts(self) -> float:
        """Power while steps ran. NaN if no energy was read."""
        return self.step_joules / self.metered_s if self.metered_s else math.nan

    def since(self, before: Totals) -> Totals:
        return Totals(
            self.steps - before.steps,
            self.device_s - before.device_s,
            self.mixed_s - before.mixed_s,
            self.host_s - before.host_s,
            self.row_s - before.row_s,
            self.step_joules - before.step_joules,
            self.metered_s - before.metered_s,
        )


@dataclass(frozen=True, slots=True)
class Arrival:
    """The server's load when a request arrived."""

    waiting: int = 0
    running: int = 0
    kv_used: float = 0.0
    """Share of KV blocks held by running requests."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Engine time and work of one choice. Times in seconds."""

    queue_s: float = 0.0
    """From arrival to admission."""
    prefill_s: float = 0.0
    """From admission to the first token."""
    decode_s: float = 0.0
    """From the first token to the last."""
    preempted: int = 0
    """Number of preemptions."""
    device_s: float = 0.0
    """Its share of the device time of its steps, by query tokens."""
    drafted: int = 0
    """Draft tokens verified."""
    accepted: int = 0
    """Draft tokens accepted."""
    prompt_device_s: float = 0.0
    """The part of device_s up to the first token. The service sets it."""

    @classmethod
    def of(cls, times: Sequence[float]) -> Spent:
        """Build from `wire.messages.Delta.times`, which has the values in this order. Missing ones are 0."""
        return cls(*times)  # type: ignore[arg-type]  # counts come as whole numbers


DISCONNECTED = "cancelled"
"""`RequestRecord.cut` of a request whose client closed its connection."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The ledger's record of one request with all its choices. Times in seconds."""

    id: str
    """The id in the answer's body."""
    arrived_at: float
    """Unix seconds."""
    prompt_tokens: int
    """Includes cached_tokens."""
    cached_tokens: int
    output_tokens: int
    """Of all choices. Includes hidden_tokens."""
    finish_reasons: tuple[str, ...]
    """One for each choice that was completed."""
    e2e_s: float
    """From arrival to the end, measured in the service."""
    ttft_s: float | None
    """From arrival to the first token, measured in the service. None: no token came."""
    spent: Spent
    """Of the slowest choice. device_s, prompt_device_s, drafted and accepted are sums over all choices."""
    max_tokens: int | None = None
    """None: the request sets no limit."""
    hidden_tokens: int = 0
    """Tokens of hidden reasoning."""
    publish_s: float | None = None
    """Time to publish (docs/measures.md): from arrival to the first content that the user sees. None: none came."""
    cut: str = ""
    """Why choices were not completed, or "" if all were."""
    cut_reason: str = ""
    """Details of `cut` in words, or ""."""
    request_id: str = ""
    """Value of the header x-request-id, set by the client or by the service."""
    arrival: Arrival = Arrival()
    prefilling: Totals = Totals()
    """Work of all requests on the device between this request's arrival and its first token."""
    decoding: Totals = Totals()
    """Work of all requests on the device between this request's first and last token."""
    late: tuple[LateWork, ...] = ()
    """Kernels compiled and graphs captured while the request waited or ran."""
    declared: Slo = NO_SLO
    """Limits that the client set for this request."""
    run_id: str = ""
    """Value of the header x-run-id: the agent run that the request belongs to, or ""."""
    batch: bool = False
    """It is a row of a batch. Such rows count in no latency, goodput or arrival of online requests."""
    answer_cached: bool = False
    """The whole answer came from the answer cache. cached_tokens are then all prompt tokens."""
    cache_writes: Mapping[str, int] = field(default_factory=dict)
    """Prompt tokens that were computed and pinned in the prefix cache, by lifetime: "5m", "1h"."""
    cache_token_s: float = 0.0
    """Tokens times seconds by which it prolonged the storage of pinned prefixes."""
    prefix_hashes: tuple[int, ...] = ()
    """Of the prompt (core.workload.prefix_hashes). () for a request with several prompts."""

    @property
    def billable(self) -> Billable:
        return Billable(
            self.prompt_tokens,
            self.cached_tokens,
            self.output_tokens,
            self.cache_writes,
            self.cache_token_s,
            self.answer_cached,
        )

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first, averaged over the choices. None without a second token."""
        if not self.finish_reasons:
            return None
        later = self.output_tokens / len(self.finish_reasons) - 1
        return self.spent.decode_s / later if later > 0 else None

    @property
    def latencies(self) -> Latencies:
        return Latencies(self.ttft_s, self.publish_s, self.tpot_s, self.e2e_s)

    @property
    def elsewhere_s(self) -> float:
        """Part of e2e_s outside of the engine: text processing, HTTP, a client that reads slowly."""
        return max(0.0, self.e2e_s - self.spent.queue_s - self.spent.prefill_s - self.spent.decode_s)
