"""The two records that cross from host to device and back: `StepPlan` and `StepResult`. Plain data.

A plan is a delta. A request *joins* a row once, with everything the device must know about it, and *leaves* it once. In
between, a step names only rows, the number of query tokens of each, and their new pages. It never states a running row's
position: the device keeps it (`rows.position`), because with steps in flight the host does not know it yet.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from itertools import chain
from operator import attrgetter

from ridgeline.core.sampling import SamplingParams

_COMPARED = attrgetter("rows", "n_query", "n_draft", "samples", "tree")
_ints, _bytes = array("i").__copy__, array("b").__copy__  # factories of empty arrays


class Logits(IntEnum):
    """Which query tokens of a row need logits in this step."""

    NONE = 0
    """A prompt chunk before the last known token: nothing is sampled."""
    LAST = 1
    """The last query token needs logits to draw the next token; with drafts, the last 1 + n_draft query tokens, to verify them."""
    ALL = 2
    """As LAST when the chunk reaches the end of the known tokens (`samples`), and every query token is also scored."""


class Flag(IntFlag):
    """Why a row ended at its last token."""

    STOP = 1
    """The token is one of the row's stop ids (and min_tokens was reached). The stop token is the last one returned."""
    LIMIT = 2
    """The row has reached its limit of tokens."""


@dataclass(frozen=True, slots=True)
class Join:
    """A request takes a row.

    tokens: all tokens known so far (the prompt and, after a preemption, its output). computed: tokens whose keys and values
    already lie in pages of the same plan (a prefix hit, a fork). limit: maximum tokens of the row (prompt + max_tokens).
    stop_ids: tokens that end it. seed, choice: with the position they determine the noise of each draw, whatever else is in the
    batch. adapter: slot of its adapter, 0 for none. rank: that attends for it, where ranks divide requests.
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
    adapter: int = 0
    rank: int = 0


OWN_BLOCKS = "own blocks"
"""Origin of a transfer between blocks of the same device."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Fills blocks with keys and values that exist elsewhere: in host memory, in another engine, in other blocks. In
    StepPlan.stores it copies the other way, from the blocks to the pages.

    ticket: its number in StepPlan.cancels and in StepResult.transfers. blocks: targets; no step reads them before the transfer has
    ended. origin: the memory that it reads, OWN_BLOCKS or the name of a source (kv.prefix.Source). pages: places in that memory,
    one for each block. The source gives up after a bounded time, because requests have no deadline.
    """

    ticket: int
    blocks: Sequence[int]
    origin: str
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class Compaction:
    """Copies the slots of a row that matter most to fewer blocks.

    computed: tokens of the row when it was decided, and slots: how many slots they hold. observed: the last of these tokens, whose
    attention chooses. pages: of the row's slots, for each group of layers. targets: for each group the blocks that take the place
    of the first `blocks` of them. share: of the attention mass that each head keeps, if a policy asks for one.
    """

    row: int
    computed: int
    slots: int
    observed: int
    blocks: int
    pages: Sequence[Sequence[int]]
    targets: Sequence[Sequence[int]] = ()
    share: float = 0.0


@dataclass(slots=True)
class StepPlan:
    """One step. Parallel flat arrays; row i of the step is `rows[i]`.

    rows, generations, n_query, n_draft, logits, samples: per scheduled row. n_query includes the drafts. `samples[i]` is 1
    when the query tokens reach the end of the row's known tokens, so that a new token is drawn.
    drafts: draft tokens, flat, of rows with n_draft > 0; core.draft.DEVICE for those that the device drafted.
    tree: parent index of each draft (-1: the row's last known token), flat like `drafts`; empty for chains.
    ahead: nodes that the device drafts at the end of the step for each row that draws. unread: for each such row, an upper bound
    of its last tokens, drawn ones included, that a draft model has not read; empty without a draft model.
    pages: flat quadruples (row, group, index in the row's table, page). Device tables change before anything else runs.
    copies: flat pairs (source page, target page), copied after the tables change and before the forward pass.
    drops: flat pairs (row, slots), applied before joins: the row holds so many slots less. `pages` states its table without their
    blocks.
    measures: of compactions without targets, which ask how many blocks keep their share of the attention mass. They run after the
    stores. compactions: run after the measures and before the device's rows and tables change.
    stores: copies of blocks that this step reuses to a source; they read the blocks before anything is written to them.
    transfers: started after the stores and before anything else of the step; they may end in any later step. cancels: tickets whose
    transfers are no longer needed; after the step nothing writes to their blocks. A step may have transfers and no rows.
    masks: row -> packed bitmask of allowed tokens (little-endian uint32 words, bit t of word t // 32), for sampling rows;
    with drafts, masks for the last known token and each node, one after the other.
    biases: row -> (node, token, bias), added to the logits after node 0, the last known token, or after a draft node.
    score_ids: row -> for Logits.ALL the ids to score, one per query token (-1: none): the token *after* each query token. For a row
    with pooling, 0 for each query token that is pooled.
    bound: an upper bound of the tokens that any scheduled row holds after this step, used to choose launch shapes.
    share: most query tokens of the rows of a rank. Ranks that divide requests fill it in; else it is 0.
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
    share: int = 0
    drafts: array[int] = field(default_factory=_ints)
    tree: array[int] = field(default_factory=_ints)
    ahead: int = 0
    unread: array[int] = field(default_factory=_ints)
    pages: array[int] = field(default_factory=_ints)
    copies: array[int] = field(default_factory=_ints)
    drops: array[int] = field(default_factory=_ints)
    measures: list[Compaction] = field(default_factory=list)
    compactions: list[Compaction] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    stores: list[Transfer] = field(default_factory=list)
    cancels: list[int] = field(default_factory=list)
    masks: dict[int, bytes] = field(default_factory=dict)
    biases: dict[int, list[tuple[int, int, float]]] = field(default_factory=dict)
    score_ids: dict[int, list[int]] = field(default_factory=dict)

    @property
    def n_tokens(self) -> int:
        return sum(self.n_query)

    @property
    def changes_device_state(self) -> bool:
        """Whether the device's rows, pages or drafts change before the step runs."""
        return bool(self.joins or self.pages or self.copies or (self.drafts and max(self.drafts) >= 0))

    def withdraw(self, row: int, generation: int) -> bool:
        """Remove a join that was not sent to the device yet, with its pages; False if this plan has none for the row."""
        others = [join for join in self.joins if join.generation != generation]
        if len(others) == len(self.joins):
            return False
        self.joins = others
        kept = [self.pages[start : start + 4] for start in range(0, len(self.pages), 4) if self.pages[start] != row]
        self.pages = array("i", chain.from_iterable(kept))
        return True

    def unrestrict(self, row: int) -> None:
        """Remove the mask and the biases of a row."""
        self.masks.pop(row, None)
        self.biases.pop(row, None)

    def share_arrays(self, plan: StepPlan) -> None:
        """Use the arrays of a plan that has equal rows and drafts. Treat them as immutable."""
        self.rows, self.generations = plan.rows, plan.generations
        self.n_query, self.n_draft, self.logits, self.samples = plan.n_query, plan.n_draft, plan.logits, plan.samples
        self.drafts, self.tree = plan.drafts, plan.tree

    def repeats(self, other: StepPlan) -> bool:
        """Whether both plans give the same rows the same query tokens and drafts, and have no masks, biases or scores."""
        has_row_data = any(plan.masks or plan.biases or plan.score_ids for plan in (self, other))
        same_rows = self.ahead == other.ahead and self.generations == other.generations
        return not has_row_data and same_rows and _COMPARED(self) == _COMPARED(other) and self.unread == other.unread


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the model's distribution before temperature, filters and penalties.

    logprob, rank: of the token (rank 1 is the most probable). top_ids, top_logprobs: the requested alternatives.
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
    """What a step did. Rows are in the order of its plan.

    counts: tokens that each row gained (0 for a chunk, 1 + kept drafts when it sampled). tokens: those tokens, flat.
    flags: `Flag` of each row's last token. The dictionaries are keyed by the row's index in the step.
    logprobs: one entry per gained token. scores: one entry per scored query token. pooled: one entry, the sum of the hidden states
    of the row's pooled query tokens, float64 [d_model].
    drawn: for rows with drafts, the tokens drawn after the last known token and after each node. kept: the kept nodes, by depth.
    worth: number of nodes drafted by the device in this step that are worth verifying; without an entry, all of them.
    transfers: tickets of transfers and stores that ended, of this step or of earlier ones -> whether the content arrived; each
    ticket is stated once.
    Tickets that the plan cancels need no entry, nor do those of a plan whose step failed.
    blocks: for each of the plan's measures how many blocks keep the share, at least 1.
    device_s: seconds on the device. gap_s: idle seconds of the device before the step. fresh: part of that time was spent on work
    that later steps of the same shape do not repeat.
    lost: indices of rows that the device does not hold as planned, because an upload failed; they end.
    error: the step failed. Its rows end with this reason, and nothing else of the result may be used.
    """

    step: int
    rows: Sequence[int]
    generations: Sequence[int]
    counts: list[int]
    tokens: list[int]
    flags: list[int]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    scores: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    pooled: dict[int, list[bytes]] = field(default_factory=dict)
    drawn: dict[int, list[int]] = field(default_factory=dict)
    kept: dict[int, list[int]] = field(default_factory=dict)
    worth: dict[int, int] = field(default_factory=dict)
    transfers: dict[int, bool] = field(default_factory=dict)
    blocks: Sequence[int] = ()
    device_s: float = 0.0
    gap_s: float = 0.0
    fresh: bool = False
    lost: Sequence[int] = ()
    error: str | None = None
