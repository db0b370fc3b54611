"""What the host remembers of the rows: who sits where, and what each one's sampling costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ridgeline.core.plan import Join, StepPlan
from ridgeline.decoding.masks import pack_allowed, read_mask


@dataclass(frozen=True, slots=True)
class Resident:
    """Who holds a row. allowed: the packed mask of its allowed_token_ids, int32 words, or None."""

    join: Join
    allowed: np.ndarray | None


class Residents:
    """The rows 1 .. rows by number, and as columns for the questions asked of a whole step: generation (0: nobody; -1 in the
    first and in one behind the last, which stand for whatever is below and above), greedy, and plain (a draw by temperature,
    top_k, top_p and min_p is all it asks for). By row and generation `kinds`, what a batch depends on: the generation itself, or
    for plain ones no more than 0 or, if greedy, -1."""

    def __init__(self, rows: int, vocab: int) -> None:
        self.vocab = vocab
        self.generation = np.zeros(rows + 2, dtype=np.int32)
        self.generation[[0, -1]] = -1
        self.greedy = np.ones(rows + 1, dtype=bool)
        self.plain = np.ones(rows + 1, dtype=bool)
        self.kinds: dict[tuple[int, int], int] = {}
        self._of: dict[int, Resident] = {}

    def __getitem__(self, row: int) -> Resident:
        return self._of[row]

    def follow(self, plan: StepPlan) -> None:
        """Rows leave and join. A row out of range is left to whoever checks the join itself."""
        for row in plan.leaves:
            self._leave(row)
        for join in plan.joins:
            if 0 < join.row < len(self.plain):
                self._enter(join)

    def forget(self, plan: StepPlan) -> None:
        """The plan's changes never reached the device: nobody sits where they were for."""
        for row in (*(join.row for join in plan.joins), *plan.pages[::4]):
            self._leave(row)

    def expel(self, plan: StepPlan) -> tuple[StepPlan, list[int]]:
        """The places in the step of rows that do not hold whom the plan means, because an upload was lost; and the plan with
        the scratch row in their stead, which draws nothing."""
        held = self.generation.take(np.frombuffer(plan.rows, dtype=np.int32), mode="clip")
        lost = np.flatnonzero(held != np.frombuffer(plan.generations, dtype=np.int32)).tolist()
        if not lost:
            return plan, lost
        others, samples, logits = plan.rows[:], plan.samples[:], plan.logits[:]
        for place in lost:
            others[place] = samples[place] = logits[place] = 0
        return replace(plan, rows=others, samples=samples, logits=logits), lost

    def _enter(self, join: Join) -> None:
        one = join.sampling
        allowed = None
        if one.allowed_token_ids is not None:
            allowed = read_mask(pack_allowed(one.allowed_token_ids, self.vocab), self.vocab)
        self._leave(join.row)
        self._of[join.row] = Resident(join, allowed)
        self.generation[join.row] = join.generation
        self.greedy[join.row] = one.greedy
        more = one.penalized or one.min_tokens > 0 or bool(one.logit_bias) or one.logprobs is not None
        self.plain[join.row] = plain = not (more or allowed is not None)
        self.kinds[join.row, join.generation] = -int(one.greedy) if plain else join.generation

    def _leave(self, row: int) -> None:
        if (held := self._of.pop(row, None)) is not None:
            self.generation[row] = 0
            del self.kinds[row, held.join.generation]
