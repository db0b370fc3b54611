"""The two records that cross the middle: `StepPlan` goes down to the device, `StepResult` comes back. Plain data.

A plan is a delta. A request *joins* a row once, with everything the device must know of it, and *leaves* it once; in
between a step names only rows, how many query tokens each runs, and the pages it gained. It never states a running
row's position: the device owns that (`rows.position`), because with steps in flight the host does not know it yet.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from itertools import chain
from operator import attrgetter

from ridgeline.core.sampling import SamplingParams

_SHARED = attrgetter("rows", "n_query", "n_draft", "samples", "tree")
_ints, _bytes = array("i").__copy__, array("b").__copy__  # empty ones


class Logits(IntEnum):
    """Which query tokens of a row need logits in this step."""

    NONE = 0
    """A chunk in the middle of known tokens: nothing is sampled."""
    LAST = 1
    """The last query token samples the next token (with drafts: the last 1 + n_draft query tokens verify them)."""
    ALL = 2
    """As LAST when the chunk reaches the end of the known tokens (`samples`), and every query token is also scored."""


class Flag(IntFlag):
    """What the device saw when it wrote a row's last token."""

    STOP = 1
    """The token is one of the row's stop ids (and min_tokens was reached). The stop token is the last one returned."""
    LIMIT = 2
    """The row holds as many tokens as its limit allows."""


@dataclass(frozen=True, slots=True)
class Join:
    """A request takes a row. `tokens` are all it knows (prompt and, after a preemption, its own output).

    computed: tokens whose keys and values already lie in the pages given in the same plan (a prefix hit, a fork).
    limit: most tokens the row may ever hold (prompt + max_tokens). stop_ids: tokens that end it.
    seed, choice: with the position they determine the noise of every draw, whatever else is in the batch.
    """

    row: int
    generation: int
    tokens: Sequence[int]
    prompt_len: int
    computed: int
    limit: int
    stop_ids: tuple[int, ...]
    seed: int
    choice: int
    sampling: SamplingParams


OWN_BLOCKS = "own blocks"
"""Origin of a transfer between blocks of the device itself."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Fills blocks with keys and values that exist elsewhere: in host memory, in another engine, in other blocks.

    ticket: names it in StepPlan.cancels and in StepResult.transfers. blocks: what it writes; no step reads them before the
    ticket has ended. origin: the memory that it reads, OWN_BLOCKS or the name of a source (kv.prefix.Source). pages: places
    in that memory, one for each block. Whoever moves the content gives up after a bounded time: requests have no deadline.
    """

    ticket: int
    blocks: Sequence[int]
    origin: str
    pages: Sequence[int]


@dataclass(slots=True)
class StepPlan:
    """One step. Parallel flat arrays; row i of the step is `rows[i]`.

    rows, generations, n_query, n_draft, logits, samples: per scheduled row. n_query counts the drafts. `samples[i]` is 1
    when the query tokens reach the end of what the row knows, so that a new token is drawn.
    drafts: draft tokens, flat, of rows with n_draft > 0; core.draft.DEVICE for those that the device drafted itself.
    tree: parent index of each draft (-1 is the row's last known token), flat like `drafts`; empty means chains.
    ahead: nodes that the device drafts at the end of the step for every row that draws. unread: for each such row, how many
    of its last tokens, the drawn ones among them, a draft model has not read (an upper bound); empty where nothing reads.
    pages: flat quadruples (row, group, index in the row's table, page). Device tables change before anything else runs.
    copies: flat pairs (source page, target page), copied after the tables change and before the forward pass.
    transfers: to be started before anything else of the step runs; they may end in any later step. cancels: tickets that
    nobody waits for any more; when the step has ended, nothing writes to their blocks. A step may have transfers and no rows.
    masks: row -> packed bitmask of allowed tokens (little-endian uint32 words, bit t of word t // 32), for sampling rows;
    with drafts one mask after the other, for the last known token and for each node.
    score_ids: row -> for Logits.ALL the ids to score, one per query token (-1: none), the token *after* each query.
    bound: an upper bound of the tokens that any scheduled row holds after this step, to choose launch shapes.
    """

    step: int
    joins: list[Join] = field(default_factory=list)
    leaves: array[int] = field(default_factory=_ints)
    rows: array[int] = field(default_factory=_ints)
    generations: array[int] = field(default_factory=_ints)
    n_query: array[int] = field(default_factory=_ints)
    n_draft: array[int] = field(default_factory=_ints)
    logits: array[int] = field(default_factory=_bytes)
    samples: array[int] = field(default_factory=_bytes)
    bound: int = 0
    drafts: array[int] = field(default_factory=_ints)
    tree: array[int] = field(default_factory=_ints)
    ahead: int = 0
    unread: array[int] = field(default_factory=_ints)
    pages: array[int] = field(default_factory=_ints)
    copies: array[int] = field(default_factory=_ints)
    transfers: list[Transfer] = field(default_factory=list)
    cancels: list[int] = field(default_factory=list)
    masks: dict[int, bytes] = field(default_factory=dict)
    score_ids: dict[int, list[int]] = field(default_factory=dict)

    @property
    def n_tokens(self) -> int:
        return sum(self.n_query)

    @property
    def brings(self) -> bool:
        """Something changes on the device before the step runs: rows, their pages, or drafts that it does not know."""
        return bool(self.joins or self.pages or self.copies or (self.drafts and max(self.drafts) >= 0))

    def withdraw(self, row: int, generation: int) -> bool:
        """Take back a join that has not gone to the device yet, with its pages; False if this plan has none."""
        others = [join for join in self.joins if join.generation != generation]
        if len(others) == len(self.joins):
            return False
        self.joins = others
        kept = [self.pages[at : at + 4] for at in range(0, len(self.pages), 4) if self.pages[at] != row]
        self.pages = array("i", chain.from_iterable(kept))
        return True

    def take(self, like: StepPlan) -> None:
        """The rows, numbers and drafts of a plan that has the same: its very arrays, which nobody changes any more."""
        self.rows, self.generations = like.rows, like.generations
        self.n_query, self.n_draft, self.logits, self.samples = like.n_query, like.n_draft, like.logits, like.samples
        self.drafts, self.tree = like.drafts, like.tree

    def repeats(self, other: StepPlan) -> bool:
        """Both give the same rows the same numbers of query tokens, and state nothing else of any row but pages and what is
        drafted."""
        alone = self.masks or self.score_ids or other.masks or other.score_ids
        same = self.ahead == other.ahead and self.generations == other.generations
        return not alone and same and _SHARED(self) == _SHARED(other) and self.unread == other.unread


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one place, of the model's own distribution (before temperature, filters and penalties).

    logprob, rank: of the token itself (rank 1 is the most probable). top_ids, top_logprobs: the alternatives asked for.
    logsumexp: of the raw logits, so that a score can be renormalized elsewhere.
    """

    token: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    logsumexp: float


@dataclass(slots=True)
class StepResult:
    """What a step did, in the order of its plan's rows.

    counts: tokens each row gained (0 for a chunk, 1 + the drafts kept when it sampled). tokens: those tokens, flat.
    flags: `Flag` of the last token. logprobs: index in the step -> one entry per gained token.
    drawn, kept: index in the step -> for rows with drafts, what was drawn behind the last known token and behind each node;
    the nodes kept, in the order of their depth.
    worth: index in the step -> nodes of what the device drafted in it that are worth verifying; without an entry all.
    scores: index in the step -> one entry per scored query token. device_s: seconds on the device; gap_s: those
    between the end of the step before and its begin. fresh: part of that went into what later steps of its form are spared.
    transfers: tickets that ended by then, of this step's transfers or of earlier ones, and whether the content arrived; each
    ticket is stated once. Those that the plan cancels need no entry, nor do those of a plan whose step failed.
    lost: indices in the step of rows that the device does not hold as planned, because an upload failed; they end.
    error: the step failed; its rows end with this reason and nothing of it may be used.
    """

    step: int
    rows: Sequence[int]
    generations: Sequence[int]
    counts: list[int]
    tokens: list[int]
    flags: list[int]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    scores: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    drawn: dict[int, list[int]] = field(default_factory=dict)
    kept: dict[int, list[int]] = field(default_factory=dict)
    worth: dict[int, int] = field(default_factory=dict)
    transfers: dict[int, bool] = field(default_factory=dict)
    device_s: float = 0.0
    gap_s: float = 0.0
    fresh: bool = False
    lost: Sequence[int] = ()
    error: str | None = None
