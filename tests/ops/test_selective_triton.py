"""The kernels that select pages choose what ops.selective chooses, and attention over them is the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch

from ridgeline.ops.merge import with_sinks
from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.selective import choose_pages, selecting, write_bounds
from ridgeline.ops.step import Selection
from ridgeline.ops.table import Ops
from ridgeline.ops.triton import selective
from ridgeline.ops.triton.table import TRITON

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE, BUDGET, KV_HEADS, DIM = 8, 40, 2, 16
ROWS = [(150, 1), (9, 1), (64, 1), (33, 1), (48, 1), (0, 1)]
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
"""The interpreter multiplies no bfloat16."""

pytestmark = [pytest.mark.gpu] * (DEVICE == "cuda")


def selected(batch: Callable[..., object], heads: int = 6, rows: Sequence[tuple[int, int]] = ROWS) -> tuple:
    """A batch of decode rows on the device, whose keys bfloat16 holds, and bounds of all full pages."""
    case = batch(list(rows), heads=heads, kv_heads=KV_HEADS, head_dim=DIM, page_tokens=PAGE, junk=0.0)
    case = case.to(DEVICE, torch.float32)
    kv = case.view.kv.bfloat16().float()
    selection = Selection(BUDGET, torch.zeros(len(kv), 2, KV_HEADS, DIM, dtype=torch.bfloat16, device=DEVICE))
    view = replace(case.view, kv=kv, selection=selection)
    write_bounds(replace(view, slots=torch.arange(len(kv) * PAGE, device=DEVICE)), selection)
    return case, view


def chosen_pages(case, view, q: torch.Tensor) -> tuple[list[list[list[int]]], list[int]]:
    """Pages of each row and KV head as the kernels choose them, and the slots that they hold."""
    _, table, step = selective.choose_pages(q, view, view.selection, case.step, True)
    units = selective._Units.of(view.kv)
    table, read = table.view(len(ROWS), KV_HEADS, -1).cpu(), step.length.view(len(ROWS), KV_HEADS).cpu()
    pages = [
        [
            [
                (entry - head * units.head) // units.page
                for entry in of_head[: -(-int(read[row, head]) // PAGE)].tolist()
            ]
            for head, of_head in enumerate(of_row)
        ]
        for row, of_row in enumerate(table)
    ]
    return pages, read[:, 0].tolist()


@pytest.mark.parametrize("heads", [6, 2])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_kernels_choose_the_pages_of_the_reference(
    batch: Callable[..., object], heads: int, dtype: torch.dtype
) -> None:
    case, view = selected(batch, heads)
    q, view = case.q.to(dtype), replace(view, kv=view.kv.to(dtype))
    expected, narrowed = choose_pages(q, view, view.selection, case.step)
    pages, read = chosen_pages(case, view, q)
    assert read == narrowed.length.tolist()
    for row, count in enumerate(-(-slots // PAGE) for slots in read):
        for head in range(KV_HEADS):
            assert pages[row][head] == expected[head, row, :count].tolist()


def test_of_equal_bounds_the_first_pages_are_chosen(batch: Callable[..., object]) -> None:
    case, view = selected(batch)
    pages, _ = chosen_pages(case, view, torch.zeros_like(case.q))
    held = view.table[case.step.rows[0].long()].tolist()
    assert pages[0] == [[*held[:3], *held[17:19]]] * KV_HEADS


@pytest.mark.parametrize("merged", [pytest.param(False, marks=pytest.mark.long), True], ids=["contiguous", "merged"])
def test_attention_over_chosen_pages(batch: Callable[..., object], merged: bool) -> None:
    """merged: queries are views of the projection's result. Layers share a step, its plan too."""
    case, view = selected(batch)
    q = torch.cat((case.q, torch.zeros_like(case.q)), 1)[:, : case.q.shape[1]] if merged else case.q
    expected, expected_lse = selecting(REFERENCE).attention.attend(case.q, case.k, case.v, view, case.step, True)
    ops = selecting(TRITON)
    for _ in range(2):
        out, lse = ops.attention.attend(q, case.k, case.v, view, case.step, True)
        torch.testing.assert_close(out[:-1], expected[:-1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[:-1], expected_lse[:-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ops", [REFERENCE, TRITON], ids=["reference", "triton"])
def test_sinks_join_the_sum_over_chosen_pages(batch: Callable[..., object], ops: Ops) -> None:
    """gpt-oss: a sink joins the sum over the slots that a query reads. One row selects, one is within the budget."""
    case, view = selected(batch, heads=4, rows=[(60, 1), (9, 1)])
    sinks = torch.linspace(-6.0, 6.0, 4, device=DEVICE)
    tables, narrowed = choose_pages(case.q, view, view.selection, case.step)
    attend = with_sinks(selecting(ops).attention.attend, sinks)
    out, lse = attend(case.q, case.k, case.v, view, case.step, True)
    for row, head in product(range(2), range(KV_HEADS)):
        pages, slots = tables[head, row].long(), int(narrowed.length[row])
        keys, values = view.kv[pages, :, head].transpose(0, 1).flatten(1, 2)[:, :slots]
        group = slice(2 * head, 2 * head + 2)
        scores = torch.cat((case.q[row, group] @ keys.T * view.scale, sinks[group, None]), 1)
        torch.testing.assert_close(out[row, group], scores.softmax(1)[:, :-1] @ values, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[row, group], scores.logsumexp(1), rtol=1e-4, atol=1e-4)


def test_bounds_of_completed_pages_are_written_by_both_kernels(batch: Callable[..., object]) -> None:
    """The third and the fifth row complete a page."""
    case, view = selected(batch, rows=ROWS[:-1])
    full = view.selection.bounds.clone()
    pages = (view.slots // PAGE)[[2, 4]]
    for write in (
        lambda: selective.write_bounds(view, view.selection),
        lambda: selecting(TRITON).attention.attend(case.q, case.k, case.v, view, case.step),
    ):
        view.selection.bounds[pages] = 9.0
        write()
        assert torch.equal(view.selection.bounds[1:], full[1:])
