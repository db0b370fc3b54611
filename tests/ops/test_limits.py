"""Compiled draws within top-k, top-p and min-p: those of the reference, whatever logits look like and whoever is beside them."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from ridgeline.ops.noise import Purpose, row_key
from ridgeline.ops.rows import Int, Knob, RowState
from ridgeline.ops.sample import Limits, sample
from ridgeline.ops.table import Ops
from tests.combinations import crossed
from tests.decoding.chi import DRAWS, fits
from tests.ops.test_sample import CASES, LOGITS, Case, by_the_book, columns

MIX: list[Case] = list(
    product([0.0, 0.1, 0.8, 2.0], [0, 1, 5, 50, 4000], [1.0, 0.95, 0.5, 0.01, 0.0], [0.0, 0.05, 0.5, 1.0])
)
KINDS = ("peaked", "flat", "ties", "one-hot", "masked", "rising")


def logits_of(kind: str, rows: int, vocab: int) -> torch.Tensor:
    """float32 [rows, vocab], of which bfloat16 holds every one."""
    noise, place = torch.randn(rows, vocab), torch.arange(vocab)
    made = {
        "peaked": noise * 3 + 6 * (place < 6),
        "flat": noise * 0.01,
        "ties": (noise * 2).round(),
        "one-hot": torch.where(place == vocab // 2, 9.0, noise),
        "masked": noise.masked_fill(torch.rand(rows, vocab) < 0.98, float("-inf")),
        "rising": place / vocab + noise * 1e-3,
    }
    return made[kind].bfloat16().float()


def keys(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    key = torch.tensor([row_key(row, row % 3) for row in range(rows)], dtype=torch.int32)
    return key, torch.arange(rows, dtype=torch.int32) * 7


@pytest.mark.parametrize(
    ("kind", "vocab", "threads"),
    crossed(KINDS, [4000, 1003], (1, 2), quick=lambda *at: sum(at) % 2 == 0),
    indirect=["threads"],
)
def test_draws_are_those_of_the_reference(ops: Ops, threads: int, kind: str, vocab: int) -> None:
    """None differs here; one could where a sum of chances is within its rounding of top_p."""
    temperature, limits = columns(MIX)
    logits, (key, position) = logits_of(kind, len(MIX), vocab), keys(len(MIX))
    drawn = ops.sampler.sample(logits, temperature, key, position, Purpose.TOKEN, limits)
    assert torch.equal(drawn, sample(logits, temperature, key, position, Purpose.TOKEN, limits))
    assert int((drawn != sample(logits, temperature, key, position)).sum()) > len(MIX) // 20


@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_limited_distribution(ops: Ops, case: Case) -> None:
    temperature, limits = columns([case] * DRAWS)
    key = torch.tensor([row_key(7, 0)], dtype=torch.int32).expand(DRAWS, 2)
    drawn = ops.sampler.sample(
        LOGITS.repeat(DRAWS, 1), temperature, key, torch.arange(DRAWS).int(), Purpose.TOKEN, limits
    )
    assert fits(drawn, by_the_book(LOGITS, *case))
    wrong = by_the_book(LOGITS, case[0] * 1.1, *case[1:])
    assert int((wrong > 0).sum()) == 1 or not fits(drawn, wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_draws_the_same_in_any_company(ops: Ops, kind: str) -> None:
    """Alone and among others, by one thread and by two, from rows of the device in bfloat16 and from float32 beside them; most
    limits stand where a sum of chances stands."""
    vocab, rows = 9000, 48
    logits, (key, position) = logits_of(kind, rows, vocab), keys(rows)
    chances = torch.softmax(logits, 1).sort(dim=1, descending=True).values.cumsum(1)
    knobs, ints = torch.zeros(rows, len(Knob)), torch.zeros(rows, Int.STOP + 2, dtype=torch.int32)
    knobs[:, Knob.TEMPERATURE] = 1.0
    knobs[:, Knob.TOP_P] = chances.gather(1, torch.randint(0, 60, (rows, 1)))[:, 0]
    knobs[::5, Knob.TOP_P] = 1.0
    knobs[::3, Knob.MIN_P] = 0.1
    ints[:, Int.TOP_K] = torch.tensor([0, 20, 60]).repeat(rows // 3)
    ints[:, Int.KEY : Int.KEY + 2], ints[:, Int.KNOWN] = key, position
    state = RowState(torch.zeros(rows, 4, dtype=torch.int32), ints, torch.zeros(1, rows, 1, dtype=torch.int32), 16)
    temperature, limits = (
        knobs[:, Knob.TEMPERATURE],
        Limits(ints[:, Int.TOP_K], knobs[:, Knob.TOP_P], knobs[:, Knob.MIN_P]),
    )
    every, before, outputs = torch.arange(rows, dtype=torch.int32), torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        outputs.append(ops.sampler.draw(state, knobs, every, logits.bfloat16(), None))
        outputs.append(ops.sampler.sample(logits, temperature, key, position, Purpose.TOKEN, limits))
        for given in (logits, logits.bfloat16()):
            each = [
                ops.sampler.draw(state, knobs, every[row : row + 1], given[row : row + 1], None) for row in range(rows)
            ]
            outputs.append(torch.cat(each))
    torch.set_num_threads(before)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_what_is_no_number_is_not_drawn(ops: Ops) -> None:
    logits = torch.full((4, 100), float("-inf"))
    logits[1] = float("nan")
    logits[2] = torch.where(torch.arange(100) % 2 == 0, float("nan"), torch.arange(100.0))
    logits[3, 40] = float("inf")
    logits[3, :40] = 1.0
    temperature, limits = columns([(1.0, 3, 0.5, 0.1)] * 4)
    for _ in range(20):
        key = torch.randint(-1000, 1000, (4, 2), dtype=torch.int32)
        drawn = ops.sampler.sample(logits, temperature, key, key[:, 0].abs(), Purpose.TOKEN, limits).tolist()
        assert drawn[:2] == [0, 0] and drawn[2] in (95, 97, 99) and drawn[3] == 40
