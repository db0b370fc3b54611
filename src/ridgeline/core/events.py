"""What the scheduler reports after a step: the updates of its choices, and the step's counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ridgeline.core.plan import TokenLogprobs


class PinOutcome(NamedTuple):
    """What became of a breakpoint of a prompt.

    tokens: of its prefix, in whole blocks. state: "written", "renewed" or "refused", and then `reason` says why. lost: why an
    earlier pin of this prefix was lost, if no request has been told; else "". token_s: tokens times seconds by which the request
    prolonged the storage of the prefix.
    """

    tokens: int
    state: str
    reason: str = ""
    lost: str = ""
    token_s: float = 0.0


@dataclass(slots=True)
class Update:
    """Update of one choice of a request. wire.messages.Delta carries it between the processes, field by field."""

    id: str
    choice: int
    tokens: list[int]
    finish: str = ""
    stop_id: int = -1
    cached: int = -1
    error: str = ""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    times: tuple[float, ...] | None = None
    pins: list[PinOutcome] | None = None
    pooled: list[bytes] | None = None


@dataclass(slots=True)
class StepUpdates:
    """All updates of one step.

    Most choices gain one token and nothing else. These are stored in three parallel lists: request id, choice and token. All other
    updates are in `others`.
    """

    others: list[Update] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.ids or self.others)

    def each(self) -> Iterator[Update]:
        """One update per choice."""
        for request, choice, token in zip(self.ids, self.choices, self.tokens, strict=True):
            yield Update(request, choice, [token])
        yield from self.others


@dataclass(frozen=True, slots=True)
class LateWork:
    """Work after Ready that start-up should have done. kind: "compile" of a kernel. "capture" of a graph does not occur, because
    start-up captures every graph.
    """

    kind: str
    name: str
    seconds: float


@dataclass(slots=True)
class StepCounts:
    """Counts since the last record, in tokens, requests and blocks."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    drafts: int = 0
    """Drafts verified, of one node or more."""
    accepted_at: list[int] = field(default_factory=list)
    """Accepted tokens by their depth in the draft, first depth first."""
    saved_s: float = 0.0
    """Seconds that drafts saved, compared with the measured time of steps without drafts."""
    dropped: int = 0
    """Tokens drawn for choices that had already ended, by a stop string or a cancel."""
    preempted: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    failed: int = 0
    """Steps that failed."""

    def verified(self, drafted: int, accepted: int) -> None:
        """Count one verified draft of `drafted` nodes, of which `accepted` were kept."""
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        self.accepted_at.extend([0] * (accepted - len(self.accepted_at)))
        for depth in range(accepted):
            self.accepted_at[depth] += 1


@dataclass(slots=True)
class TierCounts:
    """A tier of memory below the pool of KV blocks: what it holds now, and counts of pages since the start.

    blocks: pages that it holds. stored: copied to it. loaded: copied from it to the pool. dropped: removed, or not copied to it.
    """

    name: str
    page_bytes: int
    blocks: int = 0
    stored: int = 0
    loaded: int = 0
    dropped: int = 0
