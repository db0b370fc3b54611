"""A table of successors learns less often while nobody drafts from it."""

from __future__ import annotations

import torch

from ridgeline.ops.rows import Int, RowState
from ridgeline.ops.step import KvView
from ridgeline.speculation.device import DraftRows
from ridgeline.speculation.recycling import Recycling

VOCAB = 64


class Row:
    """One row whose last token is 5, behind the scratch row."""

    def __init__(self) -> None:
        words, ints = torch.zeros(2, 16, dtype=torch.int32), torch.zeros(2, Int.STOP + 1, dtype=torch.int32)
        words[1, 3], ints[1, Int.KNOWN] = 5, 4
        self.state = RowState(words, ints, torch.zeros(1, 2, 4, dtype=torch.int32), 4)
        self.rows, self.recycling = torch.ones(1, dtype=torch.int32), Recycling(VOCAB, torch.device("cpu"))

    def see(self, successor: int) -> bool:
        """A step in which `successor` was likeliest; whether the table learned from it."""
        if not self.recycling.learns():
            return False
        logits = torch.zeros(1, VOCAB)
        logits[0, successor] = 1.0
        self.recycling.see(self.state, self.rows, torch.full((1,), 4, dtype=torch.int32), logits)
        return True

    def draft(self) -> int:
        """The first node."""
        behind = DraftRows(self.state, self.rows, torch.zeros(2), torch.zeros(1, 1), 16, greedy=True)
        self.recycling.draft(behind, 1, lambda slots: list[KvView]())
        return int(self.state.tokens[1, 4])


def test_it_drafts_what_it_saw_last() -> None:
    row = Row()
    for successor in (9, 11):
        row.see(successor)
        assert row.draft() == successor


def test_unused_it_learns_from_some_steps_and_used_from_all_again() -> None:
    row = Row()
    row.draft()
    learned = [step for step in range(1024) if row.see(step % VOCAB)]
    assert learned[0] == 0 and 1 < len(learned) < 16, "the first, and few of the rest"
    assert row.draft() == learned[-1] % VOCAB
    row.draft()
    row.see(33)
    assert row.draft() == 33
