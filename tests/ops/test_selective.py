"""A query reads the pages with the largest bounds, the first and the newest ones; with an ample budget nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ridgeline.ops import native_cpu
from ridgeline.ops.cpu import CPU
from ridgeline.ops.reference import REFERENCE, attention
from ridgeline.ops.selective import choose_pages, selecting, write_bounds
from ridgeline.ops.step import Selection
from ridgeline.ops.table import Ops

ROWS = [(70, 1), (9, 1), (64, 1), (33, 1)]
PAGE, BUDGET = 8, 40


def selected(batch: Callable[..., object], budget: int) -> tuple:
    """A batch of decode rows whose full pages have bounds."""
    case = batch(ROWS, heads=4, kv_heads=2, head_dim=16, page_tokens=PAGE, junk=0.0)
    kv = case.view.kv
    selection = Selection(budget, torch.zeros(len(kv), 2, 2, 16, dtype=torch.bfloat16))
    view = replace(case.view, kv=kv.bfloat16().float(), selection=selection)
    all_slots = replace(view, slots=torch.arange(len(kv) * PAGE))
    write_bounds(all_slots, selection)
    return case, view


def read_by_rule(q: torch.Tensor, keys: torch.Tensor, head: int, length: int) -> list[int]:
    """The slots that one row reads for a KV head, page by page from its keys [slots, d]."""
    pages = [keys[at : at + PAGE] for at in range(0, length, PAGE)]
    bound = [
        max(
            float(torch.maximum(query * page.amin(0), query * page.amax(0)).sum())
            for query in q[2 * head : 2 * head + 2]
        )
        for page in pages
    ]
    always = {0, len(pages) - 1, max(0, len(pages) - 2)}
    ranked = sorted((at for at in range(len(pages)) if at not in always), key=lambda at: -bound[at])
    kept = sorted(always | set(ranked[: BUDGET // PAGE - len(always)]))
    return [slot for at in kept for slot in range(at * PAGE, min(length, (at + 1) * PAGE))]


@pytest.mark.parametrize("name", ["reference", "cpu", "native"])
def test_a_query_reads_the_pages_of_the_rule(batch: Callable[..., object], name: str) -> None:
    native = native_cpu.load()[0]
    tables: dict[str, Ops | None] = {"reference": REFERENCE, "cpu": CPU, "native": native}
    ops = tables[name]
    if ops is None:
        pytest.skip("no compiled operations here")
    case, view = selected(batch, BUDGET)
    out, lse = selecting(ops).attention.attend(case.q, case.k, case.v, view, case.step, True)
    assert lse is not None
    for index, (length, _) in enumerate(ROWS):
        row = view.table[case.step.rows[index], : -(-length // PAGE)].long()
        keys, values = view.kv[row].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
        for head in range(2):
            slots = read_by_rule(case.q[index], keys[head], head, length)
            assert len(slots) <= BUDGET
            scores = case.q[index, 2 * head : 2 * head + 2] @ keys[head][slots].T * view.scale
            expected = scores.softmax(-1) @ values[head][slots]
            torch.testing.assert_close(out[index, 2 * head : 2 * head + 2], expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(lse[index, 2 * head : 2 * head + 2], scores.logsumexp(-1), rtol=1e-4, atol=1e-4)


def test_no_score_of_a_page_is_above_its_bound_and_needles_are_chosen(batch: Callable[..., object]) -> None:
    """A key that points along a query is found wherever its page lies."""
    case, view = selected(batch, BUDGET)
    row = view.table[case.step.rows[0], :9].long()
    for at in range(1, 7):
        kv = view.kv.clone()
        kv[row[at], 0, :, 3] = 10 * case.q[0, ::2]
        planted = replace(view, kv=kv)
        assert planted.selection is not None
        write_bounds(replace(planted, slots=row[at : at + 1] * PAGE + PAGE - 1), planted.selection)
        tables, narrowed = choose_pages(case.q, planted, planted.selection, case.step)
        assert all(int(row[at]) in tables[head, 0].tolist() for head in range(2))
        assert narrowed.length.tolist() == [38, 9, 40, 33]
        write_bounds(replace(view, slots=row[at : at + 1] * PAGE + PAGE - 1), planted.selection)


def test_a_budget_that_holds_the_context_changes_nothing(batch: Callable[..., object]) -> None:
    case, view = selected(batch, 72)
    out, _ = selecting(REFERENCE).attention.attend(case.q, case.k, case.v, view, case.step)
    assert torch.equal(out, attention(case.q, case.k, case.v, view, case.step)[0])
