"""The acceptance rule: exact for greedy rows, and it keeps the target's distribution for sampled ones."""

from __future__ import annotations

import pytest
import torch

from ridgeline.ops.verify import accept, until_end
from tests.decoding.chi import DRAWS, draws, fits


def ints(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_the_longest_right_prefix_is_kept() -> None:
    drawn = ints([1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [9, 2, 3, 4])
    drafts = ints([1, 2, 3], [1, 0, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3])
    n_draft = torch.tensor([3, 3, 1, 0, 3], dtype=torch.int32)
    assert accept(drawn, drafts, n_draft).tolist() == [3, 1, 1, 0, 0]


def test_an_end_among_the_kept_is_the_last() -> None:
    ends = torch.tensor([[0, 0, 0, 1], [0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]], dtype=torch.bool)
    accepted = torch.tensor([3, 3, 2, 1, 3], dtype=torch.int32)
    assert until_end(ends, accepted).tolist() == [4, 2, 1, 2, 4]


@pytest.mark.parametrize("draft", [0, 3, 7])
def test_the_law_of_the_target_is_kept(draft: int) -> None:
    """Chi-square of the tokens at the first and second place, however likely the draft was."""
    vocab = 8
    target = torch.randn(2, vocab, generator=torch.Generator().manual_seed(1))
    first = draws(target[:1].expand(DRAWS, vocab), seed=1)
    second = draws(target[1:].expand(DRAWS, vocab), seed=2)
    drawn = torch.stack((first, second), dim=1)
    kept = accept(drawn, torch.full((DRAWS, 1), draft, dtype=torch.int32), torch.ones(DRAWS, dtype=torch.int32))
    chance = torch.softmax(target, dim=-1)
    assert fits(first, chance[0])
    assert abs(float(kept.float().mean()) - float(chance[0, draft])) < 0.02
    refused = chance[0].clone()
    refused[draft] = 0
    assert fits(first[kept == 0], refused / refused.sum()), "after a refusal: the target without the draft"
    assert fits(second[kept == 1], chance[1]), "the token after a kept draft"
