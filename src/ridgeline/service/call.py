"""The work that one HTTP request gives the engine, and the tokens it used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ridgeline.core.events import PinOutcome
from ridgeline.core.plan import TokenLogprobs
from ridgeline.core.sampling import SamplingParams
from ridgeline.core.slo import NO_SLO, Slo
from ridgeline.core.token_prices import Billable, TokenPrices
from ridgeline.service.breakpoints import Breakpoint
from ridgeline.wire.messages import Submit


@dataclass(frozen=True, slots=True)
class Call:
    """The work of one HTTP request: its prompts, each answered `sampling.n` times.

    arrival: time.time() seconds. tier: the service tier it runs as, "" if none was requested.
    max_tokens: as the caller gave it; None: as many as fit; 0: the engine computes one token, which is dropped.
    continues: the answer continues the last text of the prompt instead of starting a new one.
    constrained_by: the field with the answer's grammar, "" without one.
    has_reader: the answer is streamed as a text that a person reads; programs read answers with a grammar.
    request_id: of the header x-request-id. run_id: of the header x-run-id, "" without one. declared: latency limits that the caller
    set for this request. ignored: parts of its messages that the template does not read. batch: it is a row of a batch.
    breakpoints: ends of cached prefixes of its only prompt.
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

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.sampling.n

    def submits(self) -> list[Submit]:
        """One message per prompt."""
        reader = self.has_reader and not self.constrained_by
        breakpoints = [(point.tokens, point.ttl_s) for point in self.breakpoints]
        return [
            Submit(
                f"{self.id}-{index}",
                prompt,
                self.sampling,
                self.arrival,
                self.priority,
                self.salt,
                has_reader=reader,
                breakpoints=breakpoints,
            )
            for index, prompt in enumerate(self.prompts)
        ]


@dataclass(frozen=True, slots=True)
class Scored:
    """A token with its log-probabilities. start: the character of the answer's text at which the token begins."""

    start: int
    logprobs: TokenLogprobs


@dataclass(slots=True)
class Piece:
    """Update of one choice. finish: "" while it runs, else "stop" or "length".

    count: gained tokens (they count in usage). scored: tokens whose text is released now. ended_by: the scored stop token,
    which is not part of the text. stopped_by: the request's stop string or stop token id that ended the choice.
    prompt_logprobs: with the first piece of a prompt's first choice, if requested.
    """

    index: int
    text: str
    count: int
    finish: str = ""
    scored: list[Scored] = field(default_factory=list)
    ended_by: Scored | None = None
    stopped_by: str | int | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True)
class Usage:
    """Token counts of an answer. prompt includes cached and written, completion includes reasoning.

    pins: each breakpoint with what became of it. written: prompt tokens that were computed and pinned, by lifetime. prices: of its
    bill, which usage shows; None: it does not. price_factor: of the bill's dollars. repeated: the answer cache had the answer.
    received: unix seconds at which the engine's newest tokens came. published: that time for the first content that the user sees;
    None before it.
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
