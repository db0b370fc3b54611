"""Drawn tokens follow the tempered, filtered distribution, whoever else is in the batch."""

from __future__ import annotations

import pytest
import torch

from ridgeline.ops.noise import row_key
from ridgeline.ops.sample import Limits, greedy, sample, within
from tests.decoding.chi import DRAWS, draws, fits

VOCAB = 50
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2


Case = tuple[float, int, float, float]
"""temperature, top_k, top_p, min_p"""


def columns(rows: list[Case]) -> tuple[torch.Tensor, Limits]:
    """Temperatures and limits of rows."""
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*rows, strict=True))
    return temperature, Limits(top_k.int(), top_p, min_p)


def kept(logits: torch.Tensor, rows: list[Case]) -> torch.Tensor:
    """logits [N, V], a case for each -> which may be drawn, bool [N, V]."""
    return within(logits, *columns(rows)).isfinite()


def by_the_book(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Filtered distribution, the slow way: sort, cut, renormalize, cut, cut."""
    temperature, top_p, min_p = torch.tensor([temperature, top_p, min_p]).tolist()  # as rows hold them
    chance = torch.softmax(logits.double() / temperature, dim=-1)
    order = chance.argsort(descending=True).tolist()
    kept = order[:top_k] if top_k > 0 else order
    total = sum(float(chance[token]) for token in kept)
    mass, nucleus = 0.0, []
    for token in kept:
        if top_p >= 1 or mass < top_p * total:
            nucleus.append(token)
        mass += float(chance[token])
    floor = min_p * float(chance[order[0]])
    final = torch.zeros_like(chance)
    for token in nucleus:
        final[token] = chance[token] if chance[token] >= floor else 0.0
    return final / final.sum()


CASES = [
    (1.0, 0, 1.0, 0.0),
    (0.5, 0, 1.0, 0.0),
    (3.0, 0, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.0, -1, 0.8, 0.0),
    (2.0, 0, 1.0, 0.1),
    (2.0, 20, 0.7, 0.05),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 1.0, 1.0),
    (1.0, 1000, 0.999999, 0.0),
]


@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_limited_distribution(case: Case) -> None:
    logits = LOGITS.masked_fill(~kept(LOGITS.unsqueeze(0), [case])[0], float("-inf")).expand(DRAWS, VOCAB)
    assert fits(draws(logits, case[0]), by_the_book(LOGITS, *case))


def test_the_test_can_fail() -> None:
    tokens = draws(LOGITS.expand(DRAWS, VOCAB), 1.05)
    assert not fits(tokens, torch.softmax(LOGITS, dim=-1))


@pytest.mark.parametrize("vocab", [50, 5000])
def test_limits_of_a_row_ignore_the_others(vocab: int) -> None:
    flat = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 0.01
    peaked = torch.randn(vocab, generator=torch.Generator().manual_seed(2)) * 6
    rows = [*CASES, (0.7, 2000, 0.95, 0.0), (1.0, 0, 0.99, 0.0)]
    for logits in (flat, peaked):
        together = kept(logits.expand(len(rows), vocab), rows)
        for row, mine in zip(rows, together, strict=True):
            assert torch.equal(kept(logits.unsqueeze(0), [row])[0], mine), row
            assert torch.equal(mine, by_the_book(logits, *row) > 0), row


def test_ties_at_the_edge_stay() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 0.0]])
    assert kept(logits, [(1.0, 2, 1.0, 0.0)]).tolist() == [[True, True, True, False]]


def test_rows_of_different_kinds_in_one_batch() -> None:
    temperature = torch.tensor([0.0, 1.0, 0.0, 7.0])
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(5))
    key = torch.tensor([row_key(7, 0)], dtype=torch.int32).expand(4, 2)
    position = torch.arange(4, dtype=torch.int32)
    drawn = sample(logits, temperature, key, position)
    for row in range(4):
        single = slice(row, row + 1)
        assert sample(logits[single], temperature[single], key[single], position[single])[0] == drawn[row]
    assert drawn[0] == greedy(logits)[0] and drawn[2] == greedy(logits)[2]


def test_what_is_not_allowed_is_never_drawn() -> None:
    logits = torch.full((DRAWS, VOCAB), float("-inf"))
    logits[:, 17] = -50.0
    assert set(draws(logits, 100.0).tolist()) == {17}
