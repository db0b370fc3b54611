"""What the Triton draw gives by limits is what the reference gives: on a GPU where there is one, else in the interpreter."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from ridgeline.ops.noise import Purpose, row_key
from ridgeline.ops.rows import Int, Knob, RowState
from ridgeline.ops.sample import Limits, within
from ridgeline.ops.sample import sample as sample_plainly
from tests.decoding.chi import fits

pytest.importorskip("triton")

from ridgeline.ops.triton.table import TRITON

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
SLOW = [] if DEVICE == "cuda" else [pytest.mark.long]
VOCAB = 128_256 if DEVICE == "cuda" else 4_700
ROWS = 256 if DEVICE == "cuda" else 24

Draw = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Limits]
"""logits, temperature, key, position, limits."""


def logits(kind: str) -> torch.Tensor:
    """float32 [ROWS, VOCAB] of numbers that bfloat16 holds."""
    z = torch.randn(ROWS, VOCAB)
    if kind == "peaked":
        z = 3 * z
        z.scatter_(1, torch.randint(0, VOCAB, (ROWS, 12)), 19 - torch.rand(ROWS, 1) * torch.arange(12))
    elif kind == "equals":
        z = (2 * z).round() / 2
    elif (
        kind == "together"
    ):  # the likely ones are neighbours, so that the largest of their run tells little of the others
        z[:, 700:740] += 9 + torch.rand(ROWS, 40)
    elif kind == "masked":
        z[:, torch.rand(VOCAB) < 0.9] = float("-inf")
        z[: ROWS // 4, 30:] = float("-inf")
    return z.bfloat16().float()


def draw_of(z: torch.Tensor) -> Draw:
    """Rows of every mix of temperatures and limits."""
    count = len(z)

    def pick(*values: float) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), (count,))]

    limits = Limits(
        pick(0, -1, 1, 5, 30, 600, z.shape[1], z.shape[1] + 1).int(),
        pick(1.0, 1.0, 0.95, 0.8, 0.5, 0.01, 0.0),
        pick(0, 0, 0, 0.05, 0.5, 1),
    )
    key = torch.tensor([row_key(5 + row, row % 2) for row in range(count)], dtype=torch.int32)
    return z, pick(0.0, 0.1, 0.8, 1.0, 2.0), key, torch.arange(count, dtype=torch.int32), limits


def on_device(draw: Draw) -> Draw:
    *tensors, limits = draw
    z, temperature, key, place = (tensor.to(DEVICE) for tensor in tensors)
    return z, temperature, key, place, Limits(*(getattr(limits, field.name).to(DEVICE) for field in fields(limits)))


def drawn(draw: Draw, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    z, temperature, key, place, limits = on_device(draw)
    return TRITON.sampler.sample(z.to(dtype), temperature, key, place, Purpose.TOKEN, limits).cpu()


def to_the_edge(draw: Draw, row: int, token: int) -> float:
    """How far what is likelier than `token` is from top_p of what top_k leaves."""
    z, temperature, _, _, limits = draw
    chances = ((z[row] - z[row].max()).double() / max(float(temperature[row]), 1e-5)).exp()
    k = int(limits.top_k[row])
    whole = chances.sort(descending=True).values[: k if 0 < k < len(chances) else len(chances)].sum()
    return abs(float(chances[z[row] > z[row, token]].sum() / whole - limits.top_p[row]))


@pytest.mark.parametrize(
    "kind", ["equals", "masked", *(pytest.param(kind, marks=SLOW) for kind in ("peaked", "flat", "together"))]
)
def test_limits_leave_what_the_reference_leaves(kind: str) -> None:
    draw = draw_of(logits(kind))
    z, temperature, key, place, limits = on_device(draw)
    # By the same noise on both sides, whose logarithms differ between devices.
    want = TRITON.sampler.sample(within(z, temperature, limits), temperature, key, place, Purpose.TOKEN).cpu()
    got = drawn(draw)
    for row in (got != want).nonzero()[:, 0].tolist():
        assert min(to_the_edge(draw, row, int(token[row])) for token in (got, want)) < 1e-6, (kind, row)
    free = drawn((*draw[:4], Limits(limits.top_k.cpu() * 0, limits.top_p.cpu() * 0 + 1, limits.min_p.cpu() * 0)))
    assert (got != free).sum() > len(got) // 16, "limits that refuse nothing would not be tested"
    assert torch.equal(free, TRITON.sampler.sample(draw[0].to(DEVICE), temperature, key, place, Purpose.TOKEN).cpu())


def test_few_of_near_equals_are_left_to_the_last_one() -> None:
    """Where the next token would be refused, by how many are likelier or by a part of what these have together."""
    rows = 100 if DEVICE == "cuda" else 30
    z, temperature, key, place, limits = draw_of(torch.randn(rows, 600).bfloat16().float())
    z[:, 300:330] = 9 + torch.rand(rows, 30)
    temperature, limits = temperature.clamp(min=0.8), replace(limits, min_p=limits.min_p * 0)
    limits.top_k[:] = torch.arange(rows) % 25 + 1
    left = within(z, temperature, limits)
    want = TRITON.sampler.sample(
        *(tensor.to(DEVICE) for tensor in (left, temperature, key, place)), Purpose.TOKEN
    ).cpu()
    assert torch.equal(drawn((z, temperature, key, place, limits)), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=SLOW)])
def test_a_row_draws_alone_what_it_draws_among_others(dtype: torch.dtype) -> None:
    draw = draw_of(logits("together"))
    z, temperature, key, place, limits = draw
    together = drawn(draw, dtype)
    assert torch.equal(together, drawn(draw))
    for row in range(0, ROWS, 7):
        single, index = slice(row, row + 1), torch.tensor([row])
        assert (
            drawn((z[single], temperature[single], key[single], place[single], limits.of(index)), dtype)[0]
            == together[row]
        )


@pytest.mark.parametrize("wide", [pytest.param(1, marks=SLOW), 3])
def test_draw_takes_the_limits_of_the_rows(wide: int) -> None:
    """The columns of wider tables, through the number of the row, for each of its nodes."""
    ints = torch.randint(1, 50, (9, Int.STOP + 3), dtype=torch.int32, device=DEVICE)
    ints[:, Int.TOP_K] = torch.tensor([0, 3, 0, 40, 0, 2, 1, 0, 7])
    knobs = torch.full((9, len(Knob)), 5.0, device=DEVICE)
    knobs[:, Knob.TEMPERATURE] = torch.tensor([1, 1, 0.7, 1, 0, 2, 1, 1, 1])
    knobs[:, Knob.TOP_P] = torch.tensor([1, 1, 0.5, 0.9, 0.1, 0.7, 1, 1, 0.3])
    knobs[:, Knob.MIN_P] = torch.tensor([0, 0, 0, 0.1, 0, 0, 0, 0.3, 0.2])
    rows = torch.tensor([5, 1, 3, 4, 8, 7, 2, 0, 0], dtype=torch.int32, device=DEVICE)
    each = rows.repeat_interleave(wide)
    z = torch.randn(9 * wide, 5000, device=DEVICE)
    depth = torch.arange(wide, dtype=torch.int32, device=DEVICE).repeat(9)
    place = ints[each, Int.KNOWN] + depth
    limits = Limits(ints[each, Int.TOP_K], knobs[each, Knob.TOP_P], knobs[each, Knob.MIN_P])
    temperature, key = knobs[each, Knob.TEMPERATURE], ints[each, Int.KEY : Int.KEY + 2]
    state = RowState(ints.new_zeros(9, 90), ints, ints.new_zeros(1, 9, 4), 16)
    got = TRITON.sampler.draw(state, knobs, each, z, depth)
    assert torch.equal(got, TRITON.sampler.sample(z, temperature, key, place, Purpose.TOKEN, limits))
    assert torch.equal(got.cpu(), sample_plainly(z, temperature, key, place, Purpose.TOKEN, limits).cpu())


def test_logits_that_are_not_numbers_end_in_a_token_that_is_there() -> None:
    z = torch.randn(8, VOCAB)
    z[0], z[1], z[2, ::2], z[3, 5] = float("nan"), float("-inf"), float("nan"), float("inf")
    z[4, 1:] = float("-inf")
    z[5, :4096], z[6, 7] = float("nan"), float("nan")
    limits = Limits(torch.full((8,), 9, dtype=torch.int32), torch.full((8,), 0.6), torch.full((8,), 0.01))
    key = torch.arange(16, dtype=torch.int32).view(8, 2)
    for temperature in (1e-30, 1.0, 1e30):
        got = drawn((z, torch.full((8,), temperature), key, key[:, 0], limits))
        assert bool(((got >= 0) & (got < VOCAB)).all())
        assert got[3] == 5 and got[4] == 0


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter takes minutes for so many draws")
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 0.9, 0.0), (6, 1.0, 0.0), (25, 0.9, 0.0), (0, 1.0, 0.03)])
def test_draws_have_the_chances_that_limits_leave(top_k: int, top_p: float, min_p: float) -> None:
    z = logits("peaked")[:1, :5000].expand(20_000, -1)
    count = len(z)
    limits = Limits(
        torch.full((count,), top_k, dtype=torch.int32), torch.full((count,), top_p), torch.full((count,), min_p)
    )
    temperature, key = (
        torch.full((count,), 1.3),
        torch.tensor([row_key(11, 0)], dtype=torch.int32).expand(count, 2).contiguous(),
    )
    left = within(z[:1], temperature[:1], limits.of(torch.tensor([0])))[0]
    got = drawn((z.contiguous(), temperature, key, torch.arange(count, dtype=torch.int32), limits))
    assert fits(got, (left.double() / 1.3).softmax(0))
