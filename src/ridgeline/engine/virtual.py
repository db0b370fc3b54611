"""A device on a virtual clock: each step takes the seconds that a cost model predicts, and nothing is computed.

The real scheduler and loop run on it, so that a simulation makes the decisions of the server.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from ridgeline.core.cost import CostModel, WorkMeter
from ridgeline.core.draft import DEVICE, EMPTY_DRAFT, Draft
from ridgeline.core.plan import Flag, Join, StepPlan, StepResult


@dataclass(slots=True)
class _Row:
    """A running request. computed: tokens whose keys are in the cache. known: tokens of its prompt and output."""

    join: Join
    computed: int
    known: int
    ended: bool = False


class VirtualRunner:
    """Launch, collect and close (`loop.Runner`) in virtual time. `now`: virtual time in seconds.

    Steps run one after the other. A step begins at the time of its launch or at the end of the step before, whichever is
    later. `collect` moves the clock to the end of the step that it returns.

    A drawn token depends only on the request's seed, its choice and the position. An accepted node of a host drafter keeps
    its token; a node with an end token is never accepted. Not simulated: the host's time, the time to draft, grammar masks,
    log-probabilities and prompt scores.

    Args:
        cost: predicts the seconds of a step from its query tokens, its rows' contexts and its logits.
        acceptance: probability that a draft node is kept, given that its parent is. Siblings are tried in their order.
        stop_probability: probability that a drawn token is an end token, once `min_tokens` are drawn.
        seed: of the random numbers that accept draft nodes.
        page_s: seconds in which a page is copied from a tier below the pool, one page after the other. Stores take none.
    """

    def __init__(
        self,
        cost: CostModel,
        acceptance: float = 0.0,
        stop_probability: float = 0.0,
        seed: int = 0,
        page_s: float = 0.0,
    ) -> None:
        self.now = self._free_at = 0.0  # _free_at: virtual time in seconds at which the last launched step ends
        self._cost, self._meter, self._vocab = cost, WorkMeter(cost.spec), cost.spec.vocab_size
        self._acceptance, self._stop_below = acceptance, round(stop_probability * (1 << 32))
        self._random = random.Random(seed)
        self._rows: dict[int, _Row] = {}
        self._page_s, self._copied_at = page_s, 0.0  # _copied_at: virtual time at which the last copy ends
        self._copies: dict[int, float] = {}  # ticket -> virtual time at which its copy ends
        self._flight: deque[tuple[float, StepResult]] = deque()  # virtual time of the end in seconds, result

    def advance(self, to: float) -> None:
        """Move the clock forward to `to` seconds; for times when nothing runs."""
        self.now = max(self.now, to)

    def launch(self, plan: StepPlan) -> None:
        for index in plan.leaves:
            del self._rows[index]
        for index, slots in zip(plan.drops[::2], plan.drops[1::2], strict=True):
            if index in self._rows:
                self._rows[index].computed -= slots
        for join in plan.joins:
            self._rows[join.row] = _Row(join, join.computed, len(join.tokens))
        rows = [self._rows[index] for index in plan.rows]
        ends = [row.computed + count for row, count in zip(rows, plan.n_query, strict=True)]
        logits = sum(plan.samples) + len(plan.drafts) + sum(len(ids) - ids.count(-1) for ids in plan.score_ids.values())
        result = StepResult(plan.step, plan.rows, plan.generations, [], [], [])
        result.blocks = [measure.blocks for measure in plan.measures]  # nothing is attended to, so all are kept
        if rows:
            result.device_s = self._cost.step_s(self._meter.work(ends, plan.n_query, logits))
        result.gap_s = max(0.0, self.now - self._free_at)
        self._free_at += result.gap_s + result.device_s
        self._copy(plan, result)
        self._flight.append((self._free_at, result))
        first = 0
        for place, row in enumerate(rows):
            last = first + plan.n_draft[place]
            gained: list[int] = []
            row.computed += plan.n_query[place] - plan.n_draft[place]
            if plan.samples[place] and not row.ended:
                draft = (
                    Draft(tuple(plan.drafts[first:last]), tuple(plan.tree[first:last])) if last > first else EMPTY_DRAFT
                )
                gained = self._verify(row, draft, result, place) if draft.tokens else [self._take(row, DEVICE)]
            first = last
            result.counts.append(len(gained))
            result.tokens += gained
            ended = Flag.STOP if gained and gained[-1] in row.join.stop_ids else Flag.LIMIT
            result.flags.append(ended if gained and row.ended else 0)

    def _copy(self, plan: StepPlan, result: StepResult) -> None:
        """Begin the copies of a plan. The result states those that end with its step."""
        for ticket in plan.cancels:
            self._copies.pop(ticket, None)
        for transfer in plan.transfers:
            self._copied_at = max(self._copied_at, self.now) + len(transfer.pages) * self._page_s
            self._copies[transfer.ticket] = self._copied_at
        ended = [ticket for ticket, end in self._copies.items() if end <= self._free_at]
        for ticket in ended:
            del self._copies[ticket]
        result.transfers = dict.fromkeys([*ended, *(store.ticket for store in plan.stores)], True)

    def collect(self) -> StepResult:
        end, result = self._flight.popleft()
        self.advance(end)
        return result

    def close(self) -> None:
        self._flight.clear()

    def _verify(self, row: _Row, draft: Draft, result: StepResult, place: int) -> list[int]:
        """Tokens that a row gains. The result takes the draft nodes it keeps and the tokens drawn behind all nodes."""
        tokens, parents = draft.tokens, draft.parents or range(-1, len(draft.tokens) - 1)
        gained: list[int] = []
        kept = [-1]
        while len(gained) < len(kept):
            children = [node for node, parent in enumerate(parents) if parent == kept[-1]]
            allowed = (node for node in children if tokens[node] not in row.join.stop_ids)
            child = next((node for node in allowed if self._random.random() < self._acceptance), None)
            gained.append(self._take(row, DEVICE if child is None else tokens[child]))
            if child is not None and not row.ended:
                kept.append(child)
        behind = dict(zip(kept, gained, strict=True))
        result.kept[place] = kept[1:]
        result.drawn[place] = [behind.get(node, gained[-1]) for node in range(-1, len(tokens))]
        row.computed += len(kept) - 1
        return gained

    def _take(self, row: _Row, token: int) -> int:
        """Give a row this token, or for DEVICE the one drawn at its next position; returns it."""
        join, position = row.join, row.known
        if token == DEVICE:
            value = hash((join.seed, join.choice, position))  # of integers: the same in every process
            ends = value % (1 << 32) < self._stop_below and position - join.prompt_len >= join.sampling.min_tokens
            token = join.stop_ids[0] if ends and join.stop_ids else value % self._vocab
            while token in join.stop_ids and not ends:
                token = (token + 1) % self._vocab
        row.known += 1
        row.ended = row.known >= join.limit or token in join.stop_ids
        return token
