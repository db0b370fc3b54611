"""The work that one HTTP request gives the engine, and the tokens it used."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ridgeline.core.events import PinOutcome
from ridgeline.core.sampling import SamplingParams
from ridgeline.core.slo import NO_SLO, Deadline, Slo
from ridgeline.core.token_prices import Billable, TokenPrices
from ridgeline.metrics import RequestRecord
from ridgeline.service.breakpoints import Breakpoint
from ridgeline.service.trace import NO_TRACE, Trace
from ridgeline.wire.messages import Submit


class Payer:
    """Who pays for calls. The default counts nothing. name: of the API key, "" without keys."""

    name = ""

    def charge(self, record: RequestRecord, cost: float) -> float:
        """Count a call that has ended. cost: of its device time, in USD. Returns what is charged."""
        return cost


NO_PAYER = Payer()


EarlyStopping = Literal["never"] | bool


@dataclass(frozen=True, slots=True)
class Beams:
    """width: number of beams. end_ids: tokens that end a beam. length_penalty: a finished beam's score is the sum of its
    log-probabilities divided by its length to this power. early_stopping: True ends with `width` finished beams, False when the
    best running beam is worse at its length than all of them, "never" when it would be at the limit too."""

    width: int
    end_ids: frozenset[int]
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    @property
    def candidates(self) -> int:
        """Most probable tokens of each beam that are needed: `width` of them end no beam."""
        return self.width + len(self.end_ids)


@dataclass(frozen=True, slots=True)
class Call:
    """The work of one HTTP request: its prompts, each answered `sampling.n` times.

    arrival: time.time() seconds. began: the same moment in time.monotonic() seconds, which durations are measured from, because the
    wall clock may be set meanwhile. tier: the service tier it runs as, "" if none was requested.
    max_tokens: as the caller gave it; None: as many as fit; 0: the engine computes one token, which is dropped.
    continues: the answer continues the last text of the prompt instead of starting a new one.
    constrained_by: the field with the answer's grammar, "" without one.
    has_reader: the answer is streamed as a text that a person reads; programs read answers with a grammar.
    request_id: of the header x-request-id. run_id: of the header x-run-id, "" without one. declared: latency limits that the caller
    set for this request. ignored: parts of its messages that the template does not read. batch: it is a row of a batch.
    breakpoints: ends of cached prefixes of its only prompt.
    payer: the client who sent it. trace: of the HTTP request. adapter: name of its LoRA adapter, "" for the
    model itself. beams: of a beam search, whose best sampling.n answers are given.
    Choice `c` of prompt `p` has the index p * n + c in the answer.
    """

    id: str
    arrival: float
    prompts: tuple[list[int], ...]
    sampling: SamplingParams
    max_tokens: int | None
    priority: int = 0
    salt: str = ""
    tier: str = ""
    continues: bool = False
    constrained_by: str = ""
    has_reader: bool = False
    request_id: str = ""
    run_id: str = ""
    declared: Slo = NO_SLO
    ignored: tuple[str, ...] = ()
    batch: bool = False
    breakpoints: tuple[Breakpoint, ...] = ()
    payer: Payer = NO_PAYER
    trace: Trace = NO_TRACE
    adapter: str = ""
    beams: Beams | None = None
    began: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "began", time.monotonic() - max(0.0, time.time() - self.arrival))

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.sampling.n

    @property
    def engine_choices(self) -> int:
        """Choices that the engine runs at once for it: with beams, all of them."""
        return len(self.prompts) * (self.sampling.n if self.beams is None else self.beams.width)

    def submits(self, slo: Slo = NO_SLO) -> list[Submit]:
        """One message per prompt. slo: limits that the engine should keep. The caller's own only loosen them, because a tight limit
        of one request makes steps small for all."""
        declared = (limit if limit < math.inf else 0.0 for limit in self.declared.deadline)
        deadline = Deadline(*map(max, slo.deadline, declared))
        reader = self.has_reader and not self.constrained_by
        breakpoints = [(point.tokens, point.ttl_s) for point in self.breakpoints]
        return [
            Submit(
                f"{self.id}-{index}",
                prompt,
                self.sampling,
                self.began,
                self.priority,
                self.salt,
                has_reader=reader,
                breakpoints=breakpoints,
                client=self.payer.name,
                adapter=self.adapter,
                deadline=deadline,
            )
            for index, prompt in enumerate(self.prompts)
        ]


@dataclass(slots=True)
class Usage:
    """Token counts of an answer. prompt includes cached and written, completion includes reasoning.

    pins: each breakpoint with what became of it. written: prompt tokens that were computed and pinned, by lifetime. prices: of its
    bill, which usage shows; None: it does not. price_factor: of the bill's dollars. repeated: the answer cache had the answer.
    received: monotonic seconds at which the newest tokens came that may be sent. published: that time for the first content that
    the user sees; None before it.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    pins: list[tuple[Breakpoint, PinOutcome]] = field(default_factory=list)
    written: dict[str, int] = field(default_factory=dict)
    prices: TokenPrices | None = None
    price_factor: float = 1.0
    repeated: bool = False
    received: float = 0.0
    published: float | None = None

    @property
    def billable(self) -> Billable:
        return Billable(self.prompt, self.cached, self.completion, self.written, self.token_s, self.repeated)

    @property
    def token_s(self) -> float:
        """Tokens times seconds by which the request prolonged the storage of prefixes."""
        return sum(outcome.token_s for _, outcome in self.pins)

    def pin(self, breakpoints: Sequence[Breakpoint], outcomes: Sequence[PinOutcome]) -> None:
        """Record what became of the breakpoints, once `cached` is known. A token counts as written for the first pin that covers
        it."""
        self.pins = list(zip(breakpoints, outcomes, strict=True))
        end = self.cached
        for point, outcome in self.pins:
            if outcome.state == "written" and outcome.tokens > end:
                self.written[point.ttl] = self.written.get(point.ttl, 0) + outcome.tokens - end
            if outcome.state != "refused":
                end = max(end, outcome.tokens)

    def publish(self) -> None:
        """Record that the newest tokens have visible content: text that is not hidden reasoning, or part of a tool call."""
        if self.published is None:
            self.published = self.received
