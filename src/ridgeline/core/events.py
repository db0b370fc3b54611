"""What the scheduler tells the world after a step: one `Update` per choice with news, and the step's counts."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.core.plan import TokenLogprobs


@dataclass(slots=True)
class Update:
    """News of one choice of a request; see wire.messages.Delta, which carries it over the border field by field."""

    id: str
    choice: int
    tokens: list[int]
    finish: str = ""
    stop_id: int = -1
    cached: int = -1
    error: str = ""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    times: tuple[float, float, float, int] | None = None


@dataclass(slots=True)
class StepCounts:
    """Counts since the last record, in tokens, requests and blocks."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    preempted: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    failed: int = 0
    """Steps that failed."""
