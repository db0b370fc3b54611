"""What metrics are made from: one record per step, one per finished request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished request with all its choices. Times in seconds.

    prompt_tokens includes cached_tokens. output_tokens: of all choices. finish_reasons: one per choice. e2e_s, ttft_s:
    from arrival, as the service sees them (ttft None when no token came). queue_s, prefill_s, decode_s: as the engine
    measured them. max_tokens: what the request asked for, None for no limit of its own.
    """

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reasons: tuple[str, ...]
    e2e_s: float
    ttft_s: float | None
    queue_s: float
    prefill_s: float
    decode_s: float
    max_tokens: int | None = None

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first, averaged over the choices; None when none has a second token."""
        later = self.output_tokens / len(self.finish_reasons) - 1
        return self.decode_s / later if later > 0 else None
