"""The plan of split attention: every slot of every row is somebody's work exactly once, and all of it fits."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")

from ridgeline.ops.triton import attention, tuning
from ridgeline.ops.triton.attention_launch import AttentionShape
from ridgeline.ops.triton.launch import overlap
from ridgeline.ops.triton.plan import UNIT_FIELDS, plan_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
TILE, SMALLEST, GROUP, KV_HEADS, SMALL = 16, 32, 2, 3, 16


def plan(rows: list[tuple[int, int]], spare: int, window: int, finer: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(units [n, fields], per_row [2, rows]) for rows of (slots held, query tokens); device row of row i is i + 5."""
    count = len(rows) + spare
    units = torch.full((UNIT_FIELDS, count), -7, dtype=torch.int32, device=DEVICE)
    per_row = torch.full((2, len(rows)), -7, dtype=torch.int32, device=DEVICE)
    arrivals = torch.full((len(rows), KV_HEADS), -7, dtype=torch.int32, device=DEVICE)
    plan_kernel[(-(-len(rows) // 4),)](
        torch.arange(5, len(rows) + 5, dtype=torch.int32, device=DEVICE),
        torch.tensor([0] + [n for _, n in rows], device=DEVICE).cumsum(0).int(),
        torch.tensor([length for length, _ in rows], dtype=torch.int32, device=DEVICE),
        units,
        per_row,
        arrivals,
        len(rows),
        count,
        spare,
        GROUP,
        SMALL,
        SMALLEST,
        kv_heads=KV_HEADS,
        window=window,
        tile=TILE,
        FINER=finer,
        ROWS=16,
        BLOCK=4,
        **overlap(torch.device(DEVICE)),
    )
    assert not arrivals.any()
    return units.T.cpu(), per_row.cpu()


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("finer", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_units_cover_each_row_once(seed: int, finer: bool, window: int) -> None:
    draw = random.Random(seed)
    # Rows without slots, and rows whose query tokens are the chunk kernel's work, get no units.
    rows = [(0, 1), (300, SMALL // GROUP + 1)]
    rows += [(draw.randint(n, 900), n) for n in draw.choices(range(1, SMALL // GROUP + 1), k=draw.randint(1, 9))]
    draw.shuffle(rows)
    units, per_row = plan(rows, draw.randint(1, 30), window, finer)
    at, longest = 0, 1 << 30
    for index in sorted(range(len(rows)), key=lambda index: per_row[0, index].item()):
        length, n = rows[index]
        first, count = per_row[:, index].tolist()
        if length == 0 or n * GROUP > SMALL:
            assert count == 0
            continue
        assert first == at
        # A row's runs are as long as the first of them, but for what its tile lacks.
        run = -(-int(units[first][2] - units[first][1]) // TILE) * TILE
        assert run <= longest
        longest = run
        slot = max(length - n - window + 1, 0) // TILE * TILE if window else 0
        runs = set()
        for unit in units[first : first + count]:
            first_query = sum(other for _, other in rows[:index])
            begin, end = unit[1].item(), unit[2].item()
            assert unit.tolist() == [index + 5, slot, end, first_query, n, length, first, count, index]
            assert end == length or 2 * (end - begin) > SMALLEST
            if end < length:
                runs.add(end - begin)
            slot = end
        assert slot == length
        assert len(runs) <= 1 and all(run % TILE == 0 for run in runs)
        at += count
    assert (units[at:, 0] == -1).all()


def test_finer_runs_use_what_coarse_ones_leave() -> None:
    rows = [(1024, 1)] * 4
    _, coarse = plan(rows, 8, 0, False)
    _, fine = plan(rows, 8, 0, True)
    assert coarse[1].tolist() == [2] * 4
    assert fine[1].tolist() == [3] * 4


def test_rows_a_little_longer_than_a_run_are_not_cut() -> None:
    lengths = [TILE, SMALLEST, SMALLEST + 1, 3 * SMALLEST // 2 - 1, 2 * SMALLEST, 4 * SMALLEST]
    _, per_row = plan([(length, 1) for length in lengths], spare=100, window=0, finer=False)
    assert per_row[1].tolist() == [1, 1, 1, 1, 2, 4]


@pytest.mark.parametrize(
    ("rows", "query", "kernel", "smallest"),
    [
        (1, 1, "combined", tuning.SMALLEST_VERIFIED_SPLIT),
        (8, 1, "combined", tuning.SMALLEST_SPLIT),
        (49, 1, "whole", tuning.SMALLEST_SPLIT),
        (64, 1, "snug", tuning.SMALLEST_SPLIT),
        (66, 1, "whole", tuning.SMALLEST_OF_MANY),
        (255, 1, "whole", tuning.SMALLEST_OF_MANY),
        (255, 40, "whole", tuning.SMALLEST_SPLIT),
        (4, 8, "combined", tuning.SMALLEST_VERIFIED_SPLIT),
    ],
)
def test_how_short_the_parts_of_a_row_may_be(rows: int, query: int, kernel: str, smallest: int) -> None:
    """On 132 processors, with 8 KV heads and 16 of queries: up to 65 rows that decode run at a time; rows of a mixed step
    may be fewer than its graph's; those that verify have all their queries in one tile."""
    half, device = torch.bfloat16, torch.device("cuda")
    entry = attention.SPLIT.kernel_for(AttentionShape(rows, query, False, 16, 8, 128, 64, half, half, device, 132))
    assert entry is not None and (entry[0], entry[1].smallest) == (kernel, smallest)
