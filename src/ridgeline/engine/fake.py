"""A device that costs nothing and checks everything: the runner's protocol over a toy model, for tests and simulation.

Its "model" is a hash: the next token depends on every token before it. Its "cache" stores, per page and slot, which token
was written there at which position, and every query reads back all that attention would read, through the page tables.
A block freed too early, shared wrongly or copied too late therefore raises AssertionError at once.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.core.plan import Flag, Join, Logits, StepPlan, StepResult, TokenLogprobs
from ridgeline.core.spec import KvLayout


def next_token(tokens: Sequence[int], seed: int, choice: int, vocab: int) -> int:
    """The toy model: a polynomial hash of the whole prefix, the seed and the choice."""
    value = (seed * 31 + choice * 7 + 12345) & 0xFFFFFFFF
    for token in tokens:
        value = (value * 1_000_003 + token + 1) & 0xFFFFFFFF
    value ^= value >> 15
    return (value * 2_654_435_761 >> 7) % vocab


@dataclass(slots=True)
class _Row:
    """What the device knows of one row."""

    join: Join
    tokens: list[int]
    position: int
    done: bool = False


class FakeRunner:
    """launch / collect / close, as the real runner; `fail_at`: steps that fail with an error."""

    def __init__(self, layout: KvLayout, pages: int, *, vocab: int = 97, fail_at: frozenset[int] = frozenset()) -> None:
        self._layout = layout
        self._vocab = vocab
        self._fail_at = fail_at
        self._memory: list[list[tuple[int, int] | None]] = [[None] * layout.page_tokens for _ in range(pages + 1)]
        self._tables: dict[tuple[int, int], list[int]] = {}
        self._rows: dict[int, _Row] = {}
        self._results: deque[StepResult] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Run the step at once. Its result waits for `collect`, as one in flight would."""
        self._apply(plan)
        none = array("i", bytes(4 * len(plan.rows)))
        result = StepResult(plan.step, plan.rows, plan.generations, none, array("i"), none, none, device_s=1e-3)
        if plan.step in self._fail_at:
            result.error = "asked to fail"
            self._results.append(result)
            return
        counts, tokens, accepted, flags = array("i"), array("i"), array("i"), array("b")
        draft_at = 0
        for index, row in enumerate(plan.rows):
            assert self._rows[row].join.generation == plan.generations[index]
            drafts = plan.drafts[draft_at : draft_at + plan.n_draft[index]]
            draft_at += plan.n_draft[index]
            gained, flag = self._run(row, plan, index, drafts, result)
            counts.append(len(gained))
            tokens.extend(gained)
            accepted.append(max(0, len(gained) - 1))
            flags.append(flag)
        result.counts, result.tokens, result.accepted, result.flags = counts, tokens, accepted, flags
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

    def _run(
        self, row: int, plan: StepPlan, index: int, drafts: Sequence[int], result: StepResult
    ) -> tuple[list[int], int]:
        state = self._rows[row]
        queries = plan.n_query[index] - len(drafts)
        seen = state.tokens[: state.position + queries] + list(drafts)
        if not state.done:
            assert len(state.tokens) >= state.position + queries
            for position in range(state.position, len(seen)):
                self._write(row, position, seen[position])
                self._read(row, position, seen)
        if plan.logits[index] == Logits.ALL:
            result.scores[index] = [
                TokenLogprobs(token, -1.0, 1, (token,), (-1.0,), 0.0) for token in plan.score_ids[row] if token >= 0
            ]
        state.position += queries
        if not plan.samples[index] or state.done:
            return [], 0
        return self._sample(state, drafts)

    def _sample(self, state: _Row, drafts: Sequence[int]) -> tuple[list[int], int]:
        """Greedy verification: keep drafts while they are what the model says, then add one token."""
        gained: list[int] = []
        flag = Flag(0)
        for draft in [*drafts, -1]:
            token = next_token(state.tokens, state.join.seed, state.join.choice, self._vocab)
            state.tokens.append(token)
            gained.append(token)
            outputs = len(state.tokens) - state.join.prompt_len
            if token in state.join.stop_ids and outputs > state.join.sampling.min_tokens:
                flag |= Flag.STOP
            if len(state.tokens) >= state.join.limit:
                flag |= Flag.LIMIT
            if flag or token != draft:
                break
        state.position += len(gained) - 1
        state.done = bool(flag)
        return gained, int(flag)

    def _write(self, row: int, position: int, token: int) -> None:
        for group in range(len(self._layout.groups)):
            page, slot = self._place(row, group, position)
            self._memory[page][slot] = (position, token)

    def _read(self, row: int, position: int, seen: Sequence[int]) -> None:
        for number, group in enumerate(self._layout.groups):
            first = 0 if group.window is None else max(0, position - group.window + 1)
            for at in range(first, position + 1):
                page, slot = self._place(row, number, at)
                held = self._memory[page][slot]
                assert held == (at, seen[at]), f"row {row} group {number} position {at}: cache holds {held}"

    def _place(self, row: int, group: int, position: int) -> tuple[int, int]:
        index, slot = divmod(position, self._layout.page_tokens)
        page = self._tables[row, group][index]
        assert page > 0, f"row {row} group {group} position {position} has no page"
        return page, slot
