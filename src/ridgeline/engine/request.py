"""One choice of a request, as the scheduler sees it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from ridgeline.core.draft import Draft
from ridgeline.core.plan import TokenLogprobs
from ridgeline.core.sampling import SamplingParams
from ridgeline.speculation.state import SpeculationState


class Constraint(Protocol):
    """A grammar's state. A request that has one is planned only when its last token is known to the host."""

    def mask(self) -> bytes:
        """Packed bitmask of the tokens allowed next (see StepPlan.masks)."""

    def masks(self, draft: Draft) -> tuple[Draft, bytes]:
        """What of the draft the grammar allows before its end, and the masks behind the last token and each of its nodes."""

    def accept(self, tokens: Sequence[int]) -> None: ...

    @property
    def ready(self) -> bool:
        """The next mask is there, or takes no time worth mentioning; else it is being made, and the request is not planned."""

    @property
    def finished(self) -> bool:
        """Nothing but an end token may follow."""


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    LEAVING = "leaving"
    """Ended or preempted, but a step in flight still holds its row and blocks."""
    ENDED = "ended"


class Lease(Enum):
    """What a request's blocks hold of the tokens that need not be computed."""

    READY = "ready"
    """All of it."""
    RESERVED = "reserved"
    """A transfer is planned that will bring it; the device does not know of it yet."""
    FILLING = "filling"
    """The device may write to them at any time, until the transfer has ended."""


@dataclass(slots=True, eq=False)
class Request:
    """One choice. Three numbers say how far it is; a step gives it query tokens until `planned` meets `expected`:

    computed: tokens whose keys and values are committed. planned: the same with all steps in flight (an upper bound:
    drafts may be refused). expected: tokens known, with all that the steps in flight will add (an upper bound too).
    """

    id: str
    choice: int
    tokens: array[int]
    prompt_len: int
    sampling: SamplingParams
    limit: int
    stop_ids: tuple[int, ...]
    seed: int
    order: tuple[int, int]
    """(priority, arrival number): who goes first, and who is preempted last."""
    arrival: float
    root: bytes
    """Start of the prefix chain (salt and fingerprint)."""
    cache: bool
    constraint: Constraint | None = None
    followers: list[Request] = field(default_factory=list)
    """Other choices of the same prompt, waiting to share its blocks."""
    leader: Request | None = None

    state: State = State.WAITING
    row: int = 0
    generation: int = 0
    computed: int = 0
    planned: int = 0
    expected: int = 0
    in_flight: int = 0
    lease: Lease = Lease.READY
    ticket: int = 0
    """Of the transfer that fills its blocks, while they are not ready."""
    tables: list[list[int]] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    """Per group: leading blocks already returned because they lie behind the window."""
    writable: int = 0
    """Slots that may be written without asking the leases again (they are leased and nobody shares them)."""
    watch: int = 0
    """Tokens computed from which a commit must look closer; below, a drawn token is appended and that is all."""
    chain: list[bytes] = field(default_factory=list)
    published: int = 0
    """Blocks already offered to the prefix index."""
    scores: list[TokenLogprobs] = field(default_factory=list)
    finish: str = ""
    error: str = ""
    cached: int = -1
    cached_sent: bool = False
    preempted: int = 0
    first_planned: float = -1.0
    first_token: float = -1.0
    device_s: float = 0.0
    """Its part of the device's time, by query tokens, up to the moment when a query token's price stood at `paid`."""
    paid: float = -1.0
    speculation: SpeculationState = field(default_factory=SpeculationState)

    def ready(self, samples: bool, drafter_waits: Callable[[Request], bool]) -> bool:
        """Whether its next query tokens can be planned: the keys and values before them are there or will be by then. If a
        token is drawn behind them (`samples`), a grammar and a host drafter must know the last one first, and a mask that
        takes long must have been made."""
        if self.lease is not Lease.READY:
            return False
        if not samples:
            return True
        if self.in_flight:
            return self.constraint is None and not drafter_waits(self)
        return self.constraint is None or self.constraint.ready

    def pay(self, before: float, after: float, n_query: int) -> None:
        """A step took it along with `n_query` tokens. before, after: what one token in every step so far would have cost, in
        seconds, without this step and with it; since the last payment it had one token in each."""
        if self.paid >= 0:
            self.device_s += before - self.paid
        self.device_s += n_query * (after - before)
        self.paid = after

    def settle(self, price: float) -> None:
        """It leaves the device: pay for the tokens since the last payment."""
        if self.paid >= 0:
            self.device_s += price - self.paid
        self.paid = -1.0

    def times(self, now: float) -> tuple[float, ...]:
        """In the order of metrics.records.Spent, once the first token is there."""
        prefill = self.first_token - self.first_planned
        waits = self.first_planned - self.arrival, prefill, now - self.first_token
        return *waits, self.preempted, self.device_s, self.speculation.drafted, self.speculation.accepted

    @property
    def needs_scores(self) -> bool:
        return self.sampling.prompt_logprobs is not None and self.choice == 0 and len(self.scores) < self.prompt_len - 1
