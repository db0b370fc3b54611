"""Sizes of the arrays of a step. The host knows them before the step runs; they are the key of captured work."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress

from ridgeline.core.plan import StepPlan


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes for which the runner allocates memory.

    rows: requests at once. step_tokens: query tokens of a step. max_len: tokens of a request. blocks: pages of KV cache.
    graphs: use CUDA graphs, on a GPU only. drafts: numbers of nodes per row that the device may draft. host_drafts: most nodes of a
    host draft, 0 without a host drafter. pool: descriptor of the memory file of the KV cache; -1: it is in the process.
    """

    rows: int
    step_tokens: int
    max_len: int
    blocks: int
    graphs: bool = True
    drafts: tuple[int, ...] = ()
    host_drafts: int = 0
    pool: int = -1
    releasable: bool = False


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a step, exact or padded.

    rows: B. draws: S, rows that draw a token. tokens: T, query tokens of all rows. max_query: most query tokens of a row.
    width: 1 + most drafts of a row. drafts: of all rows that draw. tree: drafts may branch.
    share: most query tokens of the rows of a rank, where ranks divide requests; 0: no bound below T.

    A padding row is device row 0 and has no query tokens. A padding token belongs to the last row, which must then be a padding
    row.
    """

    rows: int
    draws: int
    tokens: int
    max_query: int = 1
    width: int = 1
    drafts: int = 0
    tree: bool = False
    share: int = 0

    @classmethod
    def of(cls, plan: StepPlan) -> StepShape:
        """The exact shape of a plan that has rows."""
        width, drafts = 1, 0
        if plan.drafts:
            width, drafts = 1 + max(plan.n_draft), sum(compress(plan.n_draft, plan.samples))
        sizes = len(plan.rows), sum(plan.samples), sum(plan.n_query), max(plan.n_query)
        return cls(*sizes, width, drafts, bool(plan.tree), plan.share)

    @classmethod
    def decoding(cls, rows: int, share: int = 0) -> StepShape:
        """Rows with one query token each, which all draw."""
        return cls(rows, rows, rows, share=share)

    @classmethod
    def mixed(cls, rows: int, tokens: int) -> StepShape:
        """Query tokens in any distribution over the rows, of which any may draw."""
        return cls(rows, rows, tokens, tokens)

    @classmethod
    def verifying(cls, rows: int, nodes: int, tree: bool) -> StepShape:
        """Rows that verify `nodes` draft nodes each."""
        return cls(rows, rows, rows * (1 + nodes), 1 + nodes, 1 + nodes, rows * nodes, tree)

    @property
    def logits(self) -> int:
        """N, query tokens whose logits are needed: one of each row that draws, and its draft nodes."""
        return self.draws + self.drafts

    @property
    def decode(self) -> bool:
        """Every row has one query token and draws."""
        return self.max_query == 1 and self.draws == self.rows

    @property
    def chunked(self) -> bool:
        """A row has query tokens whose logits are not needed: a prompt chunk."""
        return self.max_query > self.width or self.tokens > self.logits
