"""Several ranks that each hold a part of every page attend as one device does; the ranks are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ridgeline.core.sizing import GATHERED_SLOTS
from ridgeline.ops import rows
from ridgeline.ops.cpu import CPU
from ridgeline.ops.gathered import FEWEST_TOKENS, Division
from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.rows import Int, RowState
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.striped import LEAST_SHARE, MOST_ROWS, split_tokens, striped
from ridgeline.ops.table import Ops
from tests.lockstep import Lockstep, Rank

CHUNKS = [(70, 7), (1, 1), (60, 40), (80, 5)]
CASES: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {
    "decode": ([(150, 1), (17, 1), (0, 1), (96, 1)], {"padding": 2}),
    "decode-window": ([(150, 1), (17, 1), (96, 1)], {"window": 40}),
    "chunks": (CHUNKS, {"padding": 3, "heads": 4}),
    "chunks-window": (CHUNKS, {"window": 19}),
    "chunks-softcap": (CHUNKS, {"softcap": 2.0}),
    "trees": ([(80, 9), (100, 7), (70, 66)], {"tree": True}),
    "trees-window": ([(80, 9), (100, 7), (70, 12)], {"tree": True, "window": 19}),
}
SHIPPED = {"reference": REFERENCE, "cpu": CPU}


def part_of(view: KvView, rank: Rank) -> KvView:
    """The view of a rank: its part of each page."""
    size = view.page_tokens // rank.size
    return replace(view, kv=view.kv[:, :, :, rank.rank * size : (rank.rank + 1) * size].contiguous())


def attend(ops: Ops, case: Any, rank: Rank, step: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """step: without what another rank derived from it."""
    view = part_of(case.view, rank)
    out, lse = striped(ops, rank).attention.attend(case.q, case.k, case.v, view, replace(step), True)
    assert lse is not None
    return out, lse


def near(part: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    torch.testing.assert_close(part[0], want[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(part[1], want[1], atol=1e-5, rtol=1e-5)


def whole(case: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = REFERENCE.attention.attend(case.q, case.k, case.v, case.view, case.step, True)
    assert lse is not None
    return out, lse


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("ops", SHIPPED)
@pytest.mark.parametrize("name", CASES)
def test_ranks_attend_as_one(name: str, ops: str, size: int, batch: Callable[..., Any]) -> None:
    rows, fields = CASES[name]
    case = batch(rows, **fields)
    tokens = int(case.step.q_start[-1])  # padding behind them has no result
    want = whole(case)
    for part in Lockstep(size).run(lambda rank: attend(SHIPPED[ops], case, rank, case.step)):
        near((part[0][:tokens], part[1][:tokens]), (want[0][:tokens], want[1][:tokens]))


@pytest.mark.parametrize("name", ["chunks", "trees"])
@pytest.mark.parametrize("size", [2, 4])
def test_split_tokens_get_their_own_results(name: str, size: int, batch: Callable[..., Any]) -> None:
    """And each rank sends as many bytes as the planner counts: out and log-sum-exp in float32, of others' tokens."""
    rows, fields = CASES[name]
    case = batch(rows, **(fields | {"padding": 0}))
    group, (tokens, heads, width) = Lockstep(size), case.q.shape
    want = whole(case)

    def split(rank: Rank) -> torch.Tensor:
        def run(stream: torch.Tensor, views: Any, step: StepInputs) -> torch.Tensor:
            assert len(stream) < tokens
            out, lse = attend(REFERENCE, case, rank, step)
            return torch.cat((out.flatten(1), lse), 1)

        return split_tokens(run, rank)(case.q.flatten(1), [], replace(case.step))

    for merged in group.run(split):
        near((merged[:, :-heads].unflatten(1, (heads, width)), merged[:, -heads:]), want)
    share = Division(tokens, size, True).share
    part = share * heads * (width + 1) * 4 * (size - 1)
    assert group.sent == part * (2 if fields.get("tree") else 1) + part, (
        "the exchange, then the tokens after the layers"
    )


PROMPTS: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {
    "one": ([(130, 50)], {"heads": 4}),
    "first": ([(75, 75)], {"head_dim": 64}),
    "several": ([(90, 33), (70, 1), (61, 61)], {"heads": 4}),
    "window": ([(90, 33), (61, 61)], {"window": 19}),
    "softcap": ([(130, 50)], {"softcap": 2.0}),
    "padding": ([(90, 41), (61, 20)], {"padding": 17}),
}


def prompt(ops: Ops, case: Any, rank: Rank) -> torch.Tensor:
    """Attention through split_tokens [T, Hq d]: each rank has the queries of its tokens only."""
    view = part_of(case.view, rank)

    def run(stream: torch.Tensor, views: Any, step: StepInputs) -> torch.Tensor:
        q = stream.unflatten(1, case.q.shape[1:])
        return striped(ops, rank).attention.attend(q, None, None, view, step)[0].flatten(1)

    return split_tokens(run, rank)(case.q.flatten(1), [], replace(case.step))


def interpreted() -> Ops:
    """The GPU's operations. The interpreter runs one kernel at a time."""
    from ridgeline.ops.triton.table import TRITON

    lock, attention = threading.Lock(), TRITON.attention

    def locked(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            with lock:
                return operation(*arguments)

        return run

    locked_attention = replace(attention, attend=locked(attention.attend), qkv_write=locked(attention.qkv_write))
    return replace(TRITON, attention=locked_attention)


@pytest.mark.parametrize(
    ("name", "ops", "size"),
    [*((name, ops, 2) for name in PROMPTS for ops in SHIPPED), ("several", "reference", 4), ("window", "triton", 2)],
)
def test_keys_of_prompts_travel(name: str, ops: str, size: int, batch: Callable[..., Any]) -> None:
    """Ranks gather the keys of the rows, and each attends for early and late tokens of its own."""
    if ops == "triton":
        pytest.importorskip("triton")
    rows, fields = PROMPTS[name]
    case = batch(rows, **fields)
    tokens = int(case.step.q_start[-1])
    want, _ = whole(case)
    group, table = Lockstep(size), interpreted() if ops == "triton" else SHIPPED[ops]
    for merged in group.run(lambda rank: prompt(table, case, rank)):
        torch.testing.assert_close(merged[:tokens], want.flatten(1)[:tokens], atol=1e-5, rtol=1e-4)
    pages = -(-case.step.max_length // case.view.page_tokens) * len(rows)
    share = Division(len(case.q), size, True).share * case.q[0].nbytes
    assert group.sent == (size - 1) * (pages * case.view.kv[0].nbytes // size + share)


@pytest.mark.parametrize("ops", [*SHIPPED, "triton"])
def test_each_rank_turns_its_queries_and_writes_its_slots(
    ops: str, batch: Callable[..., Any], qkv_shape: Callable[..., Any]
) -> None:
    """Of all tokens' keys and values, those whose slots the rank holds; padding goes to the scratch page."""
    if ops == "triton":
        pytest.importorskip("triton")
    table = interpreted() if ops == "triton" else SHIPPED[ops]
    case, shape = batch([(90, 33), (61, 20)], padding=3), qkv_shape(6, 2, 32, 32, True)
    merged = torch.randn(len(case.q), 10 * 32)
    view = replace(case.view, kv=case.view.kv.contiguous())
    written = replace(view, kv=view.kv.clone())
    want = REFERENCE.attention.qkv_write(merged.clone(), shape, written, replace(case.step))[0]

    def run(rank: Rank) -> tuple[torch.Tensor, torch.Tensor]:
        part = part_of(view, rank)

        def write(stream: torch.Tensor, views: Any, step: StepInputs) -> torch.Tensor:
            return striped(table, rank).attention.qkv_write(stream, shape, part, step)[0].flatten(1)

        return split_tokens(write, rank)(merged.clone(), [], replace(case.step)), part.kv

    results = Lockstep(2).run(run)
    for q, _ in results:
        torch.testing.assert_close(q, want.flatten(1), atol=1e-5, rtol=1e-4)
    held = torch.cat([kv for _, kv in results], 3)
    torch.testing.assert_close(held[1:], written.kv[1:], atol=1e-5, rtol=1e-4)


def test_queries_travel_where_the_keys_of_all_rows_are_too_many(batch: Callable[..., Any]) -> None:
    """As of a step of which the host knows only that a row may be long; attention then takes so many rows at a time."""
    case = batch([(620, 600)], heads=4)
    assert len(case.q) > MOST_ROWS > FEWEST_TOKENS
    want, _ = whole(case)

    def run(rank: Rank) -> torch.Tensor:
        long = replace(case.view, table=torch.nn.functional.pad(case.view.table, (0, GATHERED_SLOTS // 16)))
        view, step = part_of(long, rank), replace(case.step, max_length=GATHERED_SLOTS + 1)

        def attend(stream: torch.Tensor, views: Any, step: StepInputs) -> torch.Tensor:
            return striped(CPU, rank).attention.attend(case.q, None, None, view, step)[0].flatten(1)

        return split_tokens(attend, rank)(case.q.flatten(1), [], step)

    group = Lockstep(2)
    for merged in group.run(run):
        torch.testing.assert_close(merged, want.flatten(1), atol=1e-5, rtol=1e-4)
    assert group.sent == 300 * 4 * (2 * 32 + 1) * 4


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize(("count", "ranks"), [(17, 2), (64, 2), (57, 8), (33, 4), (25, 3)])
def test_each_token_is_of_one_rank(count: int, ranks: int, zigzag: bool) -> None:
    division, device = Division(count, ranks, zigzag), torch.device("cpu")
    order = division.order(device)
    assert order.shape == (ranks, division.share)
    assert sorted(token for token in order.flatten().tolist() if token < count) == list(range(count))
    assert division.joined(order.unsqueeze(-1)).flatten().tolist() == list(range(count))
    for rank in range(ranks):
        firsts = division.firsts(rank)
        assert order[rank, :: division.segment].tolist() == firsts
        if zigzag:
            assert sum(firsts) == (2 * ranks - 1) * division.segment, "as many keys before each rank's tokens"


def test_few_tokens_are_run_by_every_rank() -> None:
    stream = torch.randn(2 * LEAST_SHARE - 2, 4)
    step = StepInputs(*[torch.zeros(1, dtype=torch.int32)] * 5, 1, 1)
    for out in Lockstep(2).run(lambda rank: split_tokens(lambda x, views, step: x, rank)(stream, [], step)):
        assert out is stream


@pytest.mark.parametrize("size", [2, 4])
def test_accepted_nodes_move_between_ranks(size: int) -> None:
    """As on one device; slots of the first request straddle the parts of two ranks."""
    generator = torch.Generator().manual_seed(0)
    page, heads = 8, 2
    tables = torch.tensor([[[0, 0, 0], [3, 1, 5], [2, 4, 6]]], dtype=torch.int32)
    ints = torch.zeros(3, int(Int.STOP), dtype=torch.int32)
    ints[1, Int.LENGTH], ints[2, Int.LENGTH] = 10, 4  # 6 and 2 slots before the drafts, then what was gained
    state = RowState(torch.zeros(3, 24, dtype=torch.int32), ints, tables, page)
    packed = torch.tensor([[4, 0], [2, 0]], dtype=torch.int32)
    path = torch.tensor([[0, 2, 5, 9], [0, 3, 0, 0]])
    flat = torch.randn(7, heads, page, 4, generator=generator)
    want = flat.clone()
    arguments = state, torch.tensor([1, 2], dtype=torch.int32), packed, path
    rows.keep(*arguments, [[want]], 3)
    assert not torch.equal(want, flat)

    def kept(rank: Rank) -> torch.Tensor:
        held = page // size
        part = flat[:, :, rank.rank * held : (rank.rank + 1) * held].contiguous()
        striped(REFERENCE, rank).sampler.keep(*arguments, [[part]], 3)
        return part

    parts = torch.cat(Lockstep(size).run(kept), 2)
    assert torch.equal(parts[1:], want[1:]), "all but the scratch page"
