"""Penalties, masks, biases, early ends and log-probabilities, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ridgeline.decoding.logprobs import rank, score, to_records
from ridgeline.decoding.masks import (
    EARLY_STOP_BIAS,
    add_bias,
    apply_mask,
    pack_allowed,
    read_mask,
    suppress_stop_tokens,
)
from ridgeline.decoding.penalties import TokenHistory, apply_penalties

VOCAB = 70


def logits(rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(2))


def ints(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_penalties() -> None:
    tokens = ints([4, 4, 9, 5, 5, 5, 60, 60], [1, 2, 3, 3, 0, 0, 0, 0], [7, 7, 7, 7, 7, 7, 7, 7])
    known, prompt = [6, 4, 8], [3, 4, 0]
    presence, frequency, repetition = [0.5, 1.0, 0.0], [0.25, -1.0, 0.0], [1.5, 0.5, 1.0]
    said = TokenHistory(
        tokens, ints(*known), ints(*prompt), *(torch.tensor(values) for values in (presence, frequency, repetition))
    )
    given = logits()
    got = apply_penalties(given.clone(), said)
    for row in range(3):
        everything = tokens[row, : known[row]].tolist()
        output = everything[prompt[row] :]
        for token in range(VOCAB):
            value = float(given[row, token])
            if token in everything:
                value = value / repetition[row] if value > 0 else value * repetition[row]
            value -= frequency[row] * output.count(token) + presence[row] * (token in output)
            assert float(got[row, token]) == pytest.approx(value, abs=1e-5)
    assert torch.equal(got[2], given[2])


def test_masks() -> None:
    allowed = [0, 31, 32, 63, 69]
    words = read_mask(pack_allowed([*allowed, 500, -3], VOCAB), VOCAB)
    got = apply_mask(logits(1), torch.from_numpy(words).unsqueeze(0))
    assert got[0].isfinite().nonzero().flatten().tolist() == allowed
    assert torch.equal(got[0, allowed], logits(1)[0, allowed])


def test_a_mask_shorter_or_longer_than_the_vocabulary() -> None:
    """A tokenizer may know fewer or more tokens than the model has logits."""
    short = np.array([0xFFFFFFFF], dtype=np.uint32).tobytes()
    words = torch.from_numpy(read_mask(short, VOCAB)).unsqueeze(0)
    assert int(apply_mask(logits(1), words).isfinite().sum()) == 32
    assert len(read_mask(short * 9, VOCAB)) == 3


def test_bias_adds_up() -> None:
    got = add_bias(logits(), ints(0, 2, 2), ints(3, 4, 4), torch.tensor([1.0, 2.0, 3.0]))
    change = got - logits()
    assert change.nonzero().tolist() == [[0, 3], [2, 4]]
    assert float(change[2, 4]) == pytest.approx(5.0, abs=1e-5)


def test_ends_are_held_back_where_too_early() -> None:
    stops = ints([0, 5, -1, -1], [5, -1, -1, -1], [-1, -1, -1, -1])
    got = suppress_stop_tokens(logits(), stops, torch.tensor([True, False, True]))
    assert (got < EARLY_STOP_BIAS / 2).nonzero().tolist() == [[0, 0], [0, 5]]
    assert torch.equal(got[1:], logits()[1:])


def test_logprobs() -> None:
    given, token = logits(), ints(3, 69, 0)
    expected = torch.log_softmax(given, dim=-1)
    records = to_records(rank(given, token, 5), [5, 0, 2])
    for row, record in enumerate(records):
        assert record.token == int(token[row])
        assert record.logprob == pytest.approx(float(expected[row, record.token]), abs=1e-5)
        assert record.rank == int((given[row] > given[row, record.token]).sum()) + 1
        assert record.logsumexp == pytest.approx(float(torch.logsumexp(given[row], 0)), abs=1e-5)
    assert [len(record.top_ids) for record in records] == [5, 0, 2]
    assert records[0].top_ids == tuple(expected[0].topk(5).indices.tolist())
    assert records[0].top_logprobs == pytest.approx(expected[0].topk(5).values.tolist(), abs=1e-5)


def test_scores_in_pieces_are_the_same() -> None:
    hidden, token = logits(10), ints(*range(10))
    seen: list[int] = []

    def logits_of(part: torch.Tensor) -> torch.Tensor:
        seen.append(len(part))
        return part

    whole = score(logits_of, hidden, token, 3, VOCAB)
    pieces = score(logits_of, hidden, token, 3, VOCAB, most_bytes=4 * VOCAB * 4)
    assert seen == [10, 4, 4, 2]
    assert all(torch.equal(*same) for same in zip(whole, pieces, strict=True))
