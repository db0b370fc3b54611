"""The scheduler's record of one choice of a request."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Protocol

from ridgeline.core.draft import Draft
from ridgeline.core.events import PinOutcome
from ridgeline.core.plan import Join, StepPlan, TokenLogprobs
from ridgeline.core.sampling import SamplingParams
from ridgeline.core.slo import NO_DEADLINE, Deadline
from ridgeline.speculation.state import SpeculationState

by_order = attrgetter("order")
READER_LEAD = 8
"""Tokens that a reader has before him while his request leaves its part of steps to others, so that his stream never halts."""


class Constraint(Protocol):
    """What depends on the tokens so far: a grammar, or rules of single tokens. A request with a constraint is planned only when the
    host knows its last token."""

    def restrict(self, plan: StepPlan, row: int, draft: Draft) -> Draft:
        """Write the row's masks and biases after the last token and after each draft node into the plan. Returns the part of the
        draft that the grammar allows."""

    def accept(self, tokens: Sequence[int]) -> None:
        """The request gained `tokens`. Raises RidgelineError if the grammar does not allow them."""

    @property
    def ready(self) -> bool:
        """The next mask is available or quick to compute. If not, it is being computed, and the request is not planned."""

    @property
    def finished(self) -> bool:
        """Only an end token may follow."""


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    LEAVING = "leaving"
    """Ended or preempted, but a step in flight still holds its row and blocks."""
    ENDED = "ended"


class Lease(Enum):
    """Whether a request's blocks already hold the tokens that need not be computed."""

    READY = "ready"
    """They hold them."""
    RESERVED = "reserved"
    """A transfer is planned but not launched."""
    FILLING = "filling"
    """A launched transfer may write to the blocks until it ends."""


@dataclass(slots=True, eq=False)
class Request:
    """One choice of a request. Three counters describe its progress; steps give it query tokens while `planned` < `expected`.

    computed: tokens whose keys and values are committed. planned: computed plus the query tokens of steps in flight (an upper
    bound, because drafts may be rejected). expected: known tokens plus those that steps in flight will add (an upper bound too).
    """

    id: str
    choice: int
    tokens: array[int]
    prompt_len: int
    sampling: SamplingParams
    limit: int
    stop_ids: tuple[int, ...]
    seed: int
    order: tuple[float, int]
    """(priority, arrival number). Lower values run first and are preempted last. engine.deadlines moves late prompts back."""
    arrival: float
    root: bytes
    """Root of the prefix hash chain (salt and fingerprint)."""
    cache: bool
    has_reader: bool = False
    """A person reads the answer while it is generated."""
    deadline: Deadline = NO_DEADLINE
    breakpoints: Sequence[tuple[int, float]] = ()
    """Prefixes of the prompt to be pinned: tokens, and seconds of their lifetime. In the order of the prompt."""
    client: str = ""
    """Who sent it: clients share the service when requests wait."""
    adapter: int = 0
    """Slot of its adapter, 0 for none."""
    rank: int = 0
    """The rank that attends for it, where ranks divide requests. Its blocks are of that rank's cache."""
    charged: int = 0
    """Its service that Fairness has counted."""
    leaves: int = 0
    """Tokens of a step that it leaves to others, because it is late."""
    constraint: Constraint | None = None
    followers: list[Request] = field(default_factory=list)
    """Other choices of the same prompt, waiting to share its blocks."""
    leader: Request | None = None

    state: State = State.WAITING
    row: int = 0
    generation: int = 0
    computed: int = 0
    reached: int = 0
    """Tokens that were computed before the last preemption. Computing them again is no progress."""
    planned: int = 0
    expected: int = 0
    in_flight: int = 0
    lease: Lease = Lease.READY
    ticket: int = 0
    """Ticket of the transfer that fills its blocks, while the lease is not ready."""
    tables: list[list[int]] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    """By group: number of leading blocks that are released because they are behind the window."""
    dropped: int = 0
    """Tokens whose slots a retention policy has dropped: the other tokens' slots are that much lower than their positions."""
    measured: int = 0
    """Computed tokens when the device was asked how many blocks an adaptive policy keeps; 0: it was not asked."""
    kept: int = 0
    """Its answer; 0: none so far."""
    writable: int = 0
    """Number of leading tokens that may be written without a call of Leases.extend: their blocks are leased and not shared."""
    watch: int = 0
    """Number of computed tokens from which a commit takes the slow path; below it, a commit only appends the drawn token."""
    chain: list[bytes] = field(default_factory=list)
    published: int = 0
    """Number of leading blocks in the prefix index."""
    pins: list[PinOutcome] = field(default_factory=list)
    """What became of the first breakpoints."""
    scores: list[TokenLogprobs] = field(default_factory=list)
    pooled: list[bytes] = field(default_factory=list)
    """Sums of the hidden states of its pooled tokens, one of each step that computed some."""
    finish: str = ""
    error: str = ""
    cached: int = -1
    cached_sent: bool = False
    preempted: int = 0
    first_planned: float = -1.0
    first_token: float = -1.0
    device_s: float = 0.0
    """Share of the device time, by query tokens, up to the accumulated price `paid` of a query token. paid: -1 while it does not
    run."""
    paid: float = -1.0
    speculation: SpeculationState = field(default_factory=SpeculationState)

    def join(self, computed: int) -> Join:
        """What the device must know. computed: tokens whose keys and values are there."""
        return Join(
            self.row,
            self.generation,
            self.tokens[:],
            self.prompt_len,
            computed,
            self.limit,
            self.stop_ids,
            self.seed,
            self.choice,
            self.sampling,
            self.adapter,
            self.rank,
        )

    def ready(self, samples: bool, drafter_waits: Callable[[Request], bool]) -> bool:
        """Whether the next query tokens can be planned.

        The lease must be ready. If the step draws a token (`samples`), a constraint or a waiting host drafter needs the last token,
        so no step may be in flight, and a grammar's mask must be available.
        """
        if self.lease is not Lease.READY:
            return False
        if not samples:
            return True
        if self.in_flight:
            return self.constraint is None and not drafter_waits(self)
        return self.constraint is None or self.constraint.ready

    def ahead(self, now: float, pace_s: float) -> bool:
        """Whether a reader who takes `pace_s` seconds per token still has more than READER_LEAD tokens before him."""
        kept_s = (len(self.tokens) - self.prompt_len - READER_LEAD) * pace_s
        return self.has_reader and kept_s > now - self.first_token

    def pay(self, price_before: float, price_after: float, n_query: int) -> None:
        """Account for a step with `n_query` tokens of this request. price_before, price_after: accumulated device seconds of one
        token per step, before and after this step. Since the last call the request had one token in each step."""
        if self.paid >= 0:
            self.device_s += price_before - self.paid
        self.device_s += n_query * (price_after - price_before)
        self.paid = price_after

    def pay_remaining(self, price: float) -> None:
        """The request leaves its row: account for the steps since the last call of `pay`."""
        if self.paid >= 0:
            self.device_s += price - self.paid
        self.paid = -1.0

    def times(self, now: float) -> tuple[float, ...]:
        """Times in the order of metrics.records.Spent. Valid once the first token exists."""
        prefill = self.first_token - self.first_planned
        waits = self.first_planned - self.arrival, prefill, now - self.first_token
        return *waits, self.preempted, self.device_s, self.speculation.drafted, self.speculation.accepted

    @property
    def needs_scores(self) -> bool:
        """Prompt tokens that the prefix cache may have must be computed, because their logits or hidden states are needed."""
        scored = self.sampling.prompt_logprobs is not None and self.choice == 0
        return self.sampling.pooling in ("mean", "cls") or (scored and len(self.scores) < self.prompt_len - 1)

    def score_ids(self, count: int) -> list[int]:
        """As StepPlan.score_ids for the next `count` query tokens."""
        places = range(self.planned, self.planned + count)
        if self.sampling.pooling is not None:
            only = {"cls": 0, "last": self.prompt_len - 1}.get(self.sampling.pooling)
            return [0 if only in (None, place) else -1 for place in places]
        return [self.tokens[place + 1] if place + 1 < self.prompt_len else -1 for place in places]
