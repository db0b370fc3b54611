"""Drawn tokens follow the tempered, filtered distribution, whoever else is in the batch."""

from __future__ import annotations

import pytest
import torch

from ridgeline.decoding import sampler
from ridgeline.decoding.sampler import Filters, apply_filters
from ridgeline.ops.noise import row_key
from ridgeline.ops.sample import greedy, sample
from tests.decoding.chi import DRAWS, draws, fits

VOCAB = 50
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2


def filters(rows: list[tuple[float, int, float, float]]) -> Filters:
    """(temperature, top_k, top_p, min_p) per row."""
    heat, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*rows, strict=True))
    ranked = any(row[1] > 0 or row[2] < 1 for row in rows)
    most_k = max(row[1] for row in rows) if all(row[1] > 0 for row in rows) else 0
    return Filters(heat, top_k.int(), top_p, min_p, ranked, most_k)


def by_the_book(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Filtered distribution, the slow way: sort, cut, renormalize, cut, cut."""
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
def test_samples_follow_the_filtered_distribution(case: tuple[float, int, float, float]) -> None:
    logits = apply_filters(LOGITS.unsqueeze(0), filters([case])).expand(DRAWS, VOCAB)
    assert fits(draws(logits, case[0]), by_the_book(LOGITS, *case))


def test_the_test_can_fail() -> None:
    tokens = draws(LOGITS.expand(DRAWS, VOCAB), 1.05)
    assert not fits(tokens, torch.softmax(LOGITS, dim=-1))


@pytest.mark.parametrize("vocab", [50, 5000])
def test_filters_of_a_row_ignore_the_others(vocab: int) -> None:
    """Every path (top-k alone, shortlist, full sort) keeps the same tokens."""
    flat = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 0.01
    peaked = torch.randn(vocab, generator=torch.Generator().manual_seed(2)) * 6
    rows = [(heat, k, p, m) for heat, k, p, m in CASES] + [(0.7, 2000, 0.95, 0.0), (1.0, 0, 0.99, 0.0)]
    for logits in (flat, peaked):
        together = apply_filters(logits.expand(len(rows), vocab), filters(rows))
        for row, kept in zip(rows, together, strict=True):
            alone = apply_filters(logits.unsqueeze(0), filters([row]))[0]
            assert torch.equal(alone, kept), row
            expected = by_the_book(logits, *row)
            wrong = kept.isfinite() != (expected > 0)
            # Sums of 5000 chances in float32 may end a token earlier or later than in float64.
            assert int(wrong.sum()) <= 2 or float(expected[wrong].sum()) < 1e-5, row


def test_the_shortlist_is_taken_when_it_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    peaked = torch.randn(1, 5000, generator=torch.Generator().manual_seed(2)) * 6

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("sorted everything")

    monkeypatch.setattr(sampler.torch, "sort", refuse)
    apply_filters(peaked, filters([(1.0, 0, 0.9, 0.0)]))
    with pytest.raises(AssertionError):
        apply_filters(peaked * 0.001, filters([(1.0, 0, 0.9, 0.0)]))


def test_only_rows_that_need_more_are_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = torch.randn(6, 5000, generator=torch.Generator().manual_seed(3))
    logits = noise * torch.tensor([6.0, 0.01, 1.0, 6.0, 2.0, 0.01]).unsqueeze(1)
    wanted = filters([(1.0, 0, 0.9, 0.0)] * 5 + [(1.0, 300, 1.0, 0.0)])
    looked: list[tuple[int, int]] = []

    def topk(values: torch.Tensor, most: int, dim: int) -> torch.return_types.topk:
        looked.append((len(values), most))
        return whole(values, most, dim=dim)

    with monkeypatch.context() as changed:
        changed.setattr(sampler, "_SHORTLISTS", ())
        expected = apply_filters(logits, wanted)
    whole = torch.topk
    monkeypatch.setattr(sampler.torch, "topk", topk)
    assert torch.equal(apply_filters(logits, wanted), expected)
    assert looked == [(6, 128), (4, 1024)]


def test_ties_at_the_edge_stay() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 0.0]])
    kept = apply_filters(logits, filters([(1.0, 2, 1.0, 0.0)])).isfinite()
    assert kept.tolist() == [[True, True, True, False]]


def test_rows_of_different_kinds_in_one_batch() -> None:
    heat = torch.tensor([0.0, 1.0, 0.0, 7.0])
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(5))
    key = torch.tensor([row_key(7, 0)], dtype=torch.int32).expand(4, 2)
    position = torch.arange(4, dtype=torch.int32)
    drawn = sample(logits, heat, key, position)
    for row in range(4):
        one = slice(row, row + 1)
        assert sample(logits[one], heat[one], key[one], position[one])[0] == drawn[row]
    assert drawn[0] == greedy(logits)[0] and drawn[2] == greedy(logits)[2]


def test_what_is_not_allowed_is_never_drawn() -> None:
    logits = torch.full((DRAWS, VOCAB), float("-inf"))
    logits[:, 17] = -50.0
    assert set(draws(logits, 100.0).tolist()) == {17}
