"""What metrics are made from: one record per step, one per request, and what went on around the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ridgeline.core.events import LateWork
from ridgeline.core.slo import NO_SLO, Slo


class StepRecord(Protocol):
    """One step's counts; wire.messages.StepStats is one. Times in seconds, counts in tokens, requests and blocks."""

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
    """0: no step was run, only requests came or went."""
    failed: int
    plan_s: float
    commit_s: float
    reply_s: float
    """Of the record before: the parts of host_s."""
    dropped: int
    """Tokens drawn for choices that had ended."""
    flops: float
    """Operations of the step, by the model's formula."""
    bytes: float
    """Bytes the step must move: the weights once as they are stored, keys and values read and written."""
    predicted_s: float
    """What the cost model expected of device_s."""
    idle_s: float
    """Seconds the device waited for this step although there was work (the bubble)."""
    joules: float
    """Energy the device took since the last record that had some; 0 in most records."""
    drafts: int
    accepted_at: list[int]
    """Draft tokens accepted, by their place in the draft."""
    saved_s: float
    """Seconds that drafts saved, by what steps without any take; below 0 while they are tried in vain."""
    late: list[LateWork]
    """Kernels compiled and graphs captured since the record before, while requests waited."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Everything that steps have added up to so far; the difference of two is what went on between them.

    mixed_s: device seconds of steps that computed prompt tokens. row_s: device seconds times running requests.
    """

    steps: int = 0
    device_s: float = 0.0
    mixed_s: float = 0.0
    host_s: float = 0.0
    row_s: float = 0.0

    def since(self, before: Totals) -> Totals:
        return Totals(
            self.steps - before.steps,
            self.device_s - before.device_s,
            self.mixed_s - before.mixed_s,
            self.host_s - before.host_s,
            self.row_s - before.row_s,
        )


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a request found when it came. kv_used: share of the KV blocks that running requests held."""

    waiting: int = 0
    running: int = 0
    kv_used: float = 0.0


@dataclass(frozen=True, slots=True)
class Spent:
    """What the engine spent on a choice. Times in seconds.

    queue_s: until it was admitted. prefill_s: from there to its first token. decode_s: from there to its last.
    preempted: how often it gave up its blocks. device_s: its part of the device time of the steps it was in, by query
    tokens. drafted, accepted: tokens.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    preempted: int = 0
    device_s: float = 0.0
    drafted: int = 0
    accepted: int = 0

    @classmethod
    def of(cls, times: Sequence[float]) -> Spent:
        """From the border's plain numbers, in this order; what is not told is 0."""
        return cls(*times)  # type: ignore[arg-type]  # counts come as whole numbers


DISCONNECTED = "cancelled"
"""`RequestRecord.cut` of a request whose client closed its connection."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request with all its choices, as the ledger keeps it. Times in seconds.

    id: of the answer's body. request_id: of the header x-request-id, the client's or ours.

    prompt_tokens includes cached_tokens, output_tokens (of all choices) includes hidden_tokens. finish_reasons: one per
    choice that ended by itself; cut: why the others did not, "" if all did; cut_reason: more of it in words, "" for none.
    e2e_s, ttft_s, publish_s: from arrival, as the service sees them; publish_s: first character that is no hidden thought;
    None: it never came. spent: of the choice that took longest, but device_s, drafted and accepted of all. max_tokens:
    None for no limit of its own. decoding: what all requests together did on the device from this one's first token to
    its last. late: what was compiled or captured while it was there.
    declared: limits that its caller set for it. arrived_at: unix seconds.
    """

    id: str
    arrived_at: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reasons: tuple[str, ...]
    e2e_s: float
    ttft_s: float | None
    spent: Spent
    max_tokens: int | None = None
    hidden_tokens: int = 0
    publish_s: float | None = None
    cut: str = ""
    cut_reason: str = ""
    request_id: str = ""
    arrival: Arrival = Arrival()
    decoding: Totals = Totals()
    late: tuple[LateWork, ...] = ()
    declared: Slo = NO_SLO

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first, averaged over the choices; None when none has a second token."""
        if not self.finish_reasons:
            return None
        later = self.output_tokens / len(self.finish_reasons) - 1
        return self.spent.decode_s / later if later > 0 else None

    @property
    def elsewhere_s(self) -> float:
        """Seconds of e2e_s that neither queue nor device explains: text, HTTP, a client that reads slowly."""
        return max(0.0, self.e2e_s - self.spent.queue_s - self.spent.prefill_s - self.spent.decode_s)
