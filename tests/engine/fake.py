"""An adversarial fake device: launch, collect and close over a toy model whose cache checks every read.

The model is a hash: the next token depends on every token before it. The cache stores, for each page and slot, the token
that was written there and its position. Every query reads back all that attention would read, through the page tables. A
block that is freed too early, shared wrongly or copied too late therefore raises AssertionError at once.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ridgeline.core.draft import DEVICE, Draft
from ridgeline.core.plan import Flag, Join, Logits, StepPlan, StepResult, TokenLogprobs
from ridgeline.core.spec import KvLayout
from ridgeline.engine.result import without


def next_token(tokens: Sequence[int], seed: int, choice: int, vocab: int) -> int:
    """Next token of the toy model: a polynomial hash of the whole prefix, the seed and the choice."""
    value = (seed * 31 + choice * 7 + 12345) & 0xFFFFFFFF
    for token in tokens:
        value = (value * 1_000_003 + token + 1) & 0xFFFFFFFF
    value ^= value >> 15
    return (value * 2_654_435_761 >> 7) % vocab


@dataclass(slots=True)
class _Row:
    """State of one row on the device."""

    join: Join
    tokens: list[int]
    position: int
    done: bool = False
    drafts: list[int] = field(default_factory=list)
    """Tokens that the device drafted at the end of the last step."""


class FakeRunner:
    """A runner without a device.

    Args:
        fail_at: numbers of the steps that fail with an error.
        luck: probability that a node drafted by the device is right, given that its parent is.
        parents: parents of the device's largest draft; empty for chains.
    """

    def __init__(
        self,
        layout: KvLayout,
        pages: int,
        *,
        vocab: int = 97,
        fail_at: frozenset[int] = frozenset(),
        luck: float = 0.0,
        parents: tuple[int, ...] = (),
    ) -> None:
        self.plans: list[StepPlan] = []
        """All launched plans, in order."""
        self._layout = layout
        self._vocab = vocab
        self.fail_at = fail_at
        self._luck, self._parents, self._chance = luck, parents, random.Random(0)
        self._memory: list[list[tuple[int, int] | None]] = [[None] * layout.page_tokens for _ in range(pages + 1)]
        self._tables: dict[tuple[int, int], list[int]] = {}
        self._rows: dict[int, _Row] = {}
        self._results: deque[StepResult] = deque()

    def launch(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        """Run the step at once. Its result waits for `collect`, as one in flight would."""
        self._apply(plan)
        result = without(plan, None)
        result.device_s = 1e-3
        if plan.step in self.fail_at:
            result.error = "asked to fail"
            self._results.append(result)
            return
        draft_at = 0
        for index, row in enumerate(plan.rows):
            assert self._rows[row].join.generation == plan.generations[index]
            end = draft_at + plan.n_draft[index]
            given, mine = plan.drafts[draft_at:end], self._rows[row].drafts
            draft = Draft(
                tuple(mine[node] if token == DEVICE else token for node, token in enumerate(given)),
                tuple(plan.tree[draft_at:end]) or tuple(range(-1, len(given) - 1)),
            )
            draft_at = end
            gained, flag = self._run(row, plan, index, draft, result)
            if plan.samples[index]:
                self._draft(self._rows[row], plan.ahead)
            result.counts[index], result.flags[index] = len(gained), flag
            result.tokens += gained
        self._results.append(result)

    def collect(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        self._results.clear()

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.leaves:
            self._rows.pop(row, None)
        for join in plan.joins:
            assert join.row not in self._rows and join.computed < len(join.tokens)
            self._rows[join.row] = _Row(join, list(join.tokens), join.computed)
            for group in range(len(self._layout.groups)):
                self._tables[join.row, group] = []
        for at in range(0, len(plan.pages), 4):
            row, group, index, page = plan.pages[at : at + 4]
            table = self._tables[row, group]
            table.extend([0] * (index + 1 - len(table)))
            table[index] = page
        for at in range(0, len(plan.copies), 2):
            source, target = plan.copies[at : at + 2]
            self._memory[target] = list(self._memory[source])

    def _run(self, row: int, plan: StepPlan, index: int, draft: Draft, result: StepResult) -> tuple[list[int], int]:
        state = self._rows[row]
        queries = plan.n_query[index] - len(draft.tokens)
        root = state.position + queries - 1
        if not state.done:
            assert len(state.tokens) > root
            for position in range(state.position, root + 1):
                self._write(row, position, position, state.tokens[position])
                self._read(row, position, [], state.tokens)
            for node, token in enumerate(draft.tokens):
                path = _path(draft, node)
                self._write(row, root + 1 + node, root + len(path), token)
                said = [*state.tokens[: root + 1], *(draft.tokens[node] for node in path)]
                self._read(row, root + len(path), [root + 1 + node for node in path], said)
        if plan.logits[index] == Logits.ALL:
            result.scores[index] = [
                TokenLogprobs(token, -1.0, 1, (token,), (-1.0,), 0.0) for token in plan.score_ids[row] if token >= 0
            ]
        state.position += queries
        if not plan.samples[index] or state.done:
            return [], 0
        if draft.tokens:
            places = [
                state.tokens + [draft.tokens[step] for step in _path(draft, node)]
                for node in range(-1, len(draft.tokens))
            ]
            result.drawn[index] = [self._say(state, tokens) for tokens in places]
        gained, kept, flag = self._sample(state, draft)
        if draft.tokens:
            result.kept[index] = kept
            self._gather_path(row, root, kept)
        state.position += len(kept)
        return gained, flag

    def _say(self, state: _Row, tokens: Sequence[int]) -> int:
        return next_token(tokens, state.join.seed, state.join.choice, self._vocab)

    def _sample(self, state: _Row, draft: Draft) -> tuple[list[int], list[int], int]:
        """Greedy verification: walk to the child that is what the model says, while there is one. -> the tokens gained, the
        nodes kept, the flag."""
        gained: list[int] = []
        kept: list[int] = []
        flag, node = Flag(0), -1
        while True:
            token = self._say(state, state.tokens)
            state.tokens.append(token)
            gained.append(token)
            outputs = len(state.tokens) - state.join.prompt_len
            if token in state.join.stop_ids and outputs > state.join.sampling.min_tokens:
                flag |= Flag.STOP
            if len(state.tokens) >= state.join.limit:
                flag |= Flag.LIMIT
            right = (child for child, up in enumerate(draft.parents) if up == node and draft.tokens[child] == token)
            node = next(right, -1)
            if flag or node < 0:
                state.done = bool(flag)
                return gained, kept, int(flag)
            kept.append(node)

    def _draft(self, state: _Row, count: int) -> None:
        """Draft `count` nodes behind what the row knows. A wrong token differs from all of its siblings."""
        parents = self._parents[:count] or tuple(range(-1, count - 1))
        state.drafts = []
        for node, parent in enumerate(parents):
            draft = Draft(tuple(state.drafts), parents[:node])
            path = [] if parent < 0 else _path(draft, parent)
            right = self._say(state, state.tokens + [state.drafts[kept_node] for kept_node in path])
            taken = {state.drafts[sibling] for sibling in range(node) if parents[sibling] == parent}
            hit = self._chance.random() < self._luck and right not in taken
            state.drafts.append(
                right if hit else next(token for token in range(self._vocab, 2 * self._vocab) if token not in taken)
            )

    def _gather_path(self, row: int, root: int, kept: Sequence[int]) -> None:
        """Kept nodes move to where a chain would have written them."""
        for group in range(len(self._layout.groups)):
            held = [
                self._memory[page][slot] for page, slot in (self._place(row, group, root + 1 + node) for node in kept)
            ]
            for depth, value in enumerate(held, 1):
                page, slot = self._place(row, group, root + depth)
                self._memory[page][slot] = value

    def _write(self, row: int, at: int, position: int, token: int) -> None:
        """In slot `at` of the row, a token that was said at `position`."""
        for group in range(len(self._layout.groups)):
            page, slot = self._place(row, group, at)
            self._memory[page][slot] = (position, token)

    def _read(self, row: int, position: int, path: Sequence[int], said: Sequence[int]) -> None:
        """What the token at `position` sees: all before it, the last ones in the slots `path`."""
        for number, group in enumerate(self._layout.groups):
            first = 0 if group.window is None else max(0, position - group.window + 1)
            slots = [*range(position + 1 - len(path)), *path]
            for at in range(first, position + 1):
                page, slot = self._place(row, number, slots[at])
                held = self._memory[page][slot]
                assert held == (at, said[at]), f"row {row} group {number} position {at}: cache holds {held}"

    def _place(self, row: int, group: int, position: int) -> tuple[int, int]:
        index, slot = divmod(position, self._layout.page_tokens)
        page = self._tables[row, group][index]
        assert page > 0, f"row {row} group {group} position {position} has no page"
        return page, slot


def _path(draft: Draft, node: int) -> list[int]:
    """The nodes from below the root to `node`; empty for the root, -1."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = draft.parents[node]
    return path[::-1]
