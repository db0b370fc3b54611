"""Attention's log-sum-exp on every device, and attention over parts of the keys merged by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.ops import native_cpu
from ridgeline.ops.cpu import CPU
from ridgeline.ops.cpu_invariant import CPU_INVARIANT
from ridgeline.ops.merge import merge_attention, with_sinks
from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import Ops

GPU = "cuda" if torch.cuda.is_available() else "cpu"
Part = tuple[torch.Tensor, torch.Tensor]

DECODE = [(150, 1), (17, 1), (0, 1), (96, 1)]
CHUNKS = [(70, 7), (1, 1), (60, 40), (80, 5)]
CASES: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {
    "decode": (DECODE, {"head_dim": 64, "padding": 2}),
    "decode-128": (DECODE, {"head_dim": 128, "heads": 4}),
    "decode-window": (DECODE, {"head_dim": 64, "window": 40}),
    "decode-softcap": (DECODE, {"head_dim": 64, "softcap": 2.0}),
    "one-row": ([(400, 1)], {"head_dim": 64, "heads": 4, "kv_heads": 1}),
    "mha-odd-size": (DECODE, {"head_dim": 40, "heads": 2}),
    "chunks": (CHUNKS, {"head_dim": 64, "heads": 4, "padding": 3}),
    "chunks-128": (CHUNKS, {"head_dim": 128, "heads": 2, "kv_heads": 1}),
    "chunks-window": (CHUNKS, {"head_dim": 64, "heads": 4, "window": 19}),
    "chunks-softcap": (CHUNKS, {"head_dim": 64, "heads": 4, "softcap": 2.0}),
    "whole-prompt": ([(45, 45)], {"head_dim": 64, "heads": 4}),
    "chains": ([(80, 5), (100, 4), (70, 5)], {"head_dim": 64, "heads": 4}),
    "trees": ([(80, 9), (100, 7), (70, 12)], {"head_dim": 64, "heads": 4, "tree": True}),
}
WITH_PREFIX = ("chains", "trees")
"""Cases in which every row begins its query tokens behind slot 48."""
PARTS = [
    (name, count)
    for at, name in enumerate(name for name in CASES if name != "trees")
    for count in ((2, 3, 4) if GPU == "cuda" else [2 + (at + at // 3) % 3])
]
"""Cases and numbers of parts. On a CPU each case has one number, in turns: how many parts there are matters to the merge, which
is the same for all cases and implementations."""
IMPLEMENTATIONS = [
    "reference",
    "cpu",
    "cpu-invariant",
    *(f"native-{what}" for what in ("1-thread", "2-threads", "fixed", "avx2")),
    pytest.param("native-plain", marks=pytest.mark.long),
    *(pytest.param(name, marks=[pytest.mark.gpu] * (GPU == "cuda")) for name in ("triton", "invariant")),
]


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def target(request: pytest.FixtureRequest) -> Iterator[tuple[Ops, str, list[torch.dtype]]]:
    """(operations, device, element types to test)."""
    name = request.param
    types = [torch.float32, torch.bfloat16]
    if name in ("triton", "invariant"):
        # The interpreter computes bfloat16 products wrongly, and one type of number is enough for its time.
        yield _triton(name), GPU, types if GPU == "cuda" else types[:1]
    elif name.startswith("native"):
        variant = name.removeprefix("native-")
        where: Path = request.getfixturevalue("folder")
        if variant in ("plain", "avx2"):
            where = request.getfixturevalue("plainer")(variant)
        library, what = native_cpu.load(where, fixed=variant == "fixed")
        assert library is not None, what
        before = torch.get_num_threads()
        torch.set_num_threads(1 if variant == "1-thread" else 2)
        yield library, "cpu", types
        torch.set_num_threads(before)
    else:
        yield {"reference": REFERENCE, "cpu": CPU, "cpu-invariant": CPU_INVARIANT}[name], "cpu", types


def _triton(name: str) -> Ops:
    pytest.importorskip("triton")
    from ridgeline.ops.triton.invariant import INVARIANT
    from ridgeline.ops.triton.table import TRITON

    return TRITON if name == "triton" else INVARIANT


def interpreted(target: tuple[Ops, str, list[torch.dtype]]) -> bool:
    return target[0] not in (REFERENCE, CPU, CPU_INVARIANT) and target[1] == "cpu" and "native" not in target[0].name


def invariant(target: tuple[Ops, str, list[torch.dtype]]) -> bool:
    return "invariant" in target[0].name


def skip_in_interpreter(target: tuple[Ops, str, list[torch.dtype]], skipped: bool) -> None:
    """Skip a case that Triton's interpreter needs seconds for; a GPU runs all of them."""
    if skipped and interpreted(target):
        pytest.skip("takes Triton's interpreter too long")


def with_lse(ops: Ops, case: Any, view: KvView, step: StepInputs) -> Part:
    """Attention with its log-sum-exp, float32 [T, Hq]."""
    out, lse = ops.attention.attend(case.q, case.k, case.v, view, step, True)
    assert lse is not None and lse.dtype == torch.float32 and lse.shape == case.q.shape[:2]
    return out, lse


def near(part: Part, want: Part, dtype: torch.dtype) -> None:
    """Whether out and log-sum-exp are those wanted, among them 0 and -inf of tokens that see no key."""
    (out, lse), (want_out, want_lse) = part, want
    assert out.dtype == dtype
    error = (out.double() - want_out).norm() / want_out.norm()
    assert error < {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype], float(error)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5 if dtype == torch.float32 else 1e-3, rtol=1e-5)
    assert not out[torch.isinf(lse)].any()


def reference(case: Any) -> Part:
    out, lse = REFERENCE.attention.attend(case.q.double(), case.k, case.v, case.view, case.step)
    assert lse is not None
    return out, lse


def keys_of_pages(case: Any, first: int, stop: int) -> tuple[KvView, StepInputs]:
    """Each query token as a row of its own that sees what it saw of its row's pages first .. stop - 1."""
    view, step = case.view, case.step
    tokens, begin, size = len(step.position), first * view.page_tokens, (stop - first) * view.page_tokens
    owned, row_of = torch.arange(tokens, device=view.table.device) < step.q_start[-1], step.row_of.long()
    last = step.length[row_of] - (step.q_start[row_of + 1] - torch.arange(tokens, device=view.table.device))
    length = (last + 1 - begin).clamp(0, size) * owned * (step.length[row_of] > 0)
    position = (step.position - begin).clamp(min=0)
    if view.window is not None:
        length = length * (position - (length - 1) < view.window)
    every = torch.arange(tokens + 1, dtype=torch.int32, device=view.table.device)
    table = view.table[step.rows.long()][row_of, first:stop].contiguous()
    part = StepInputs(every[:-1], every, length.int(), position.int(), every[:-1], 1, size)
    return replace(view, table=table), part


def keys_behind(case: Any, first: int) -> tuple[KvView, StepInputs]:
    """The rows as they are, without their pages before `first`."""
    begin = first * case.view.page_tokens
    step = replace(
        case.step,
        length=case.step.length - begin,
        position=case.step.position - begin,
        max_length=case.step.max_length - begin,
    )
    return replace(case.view, table=case.view.table[:, first:].contiguous()), step


def cases(case: tuple[list[tuple[int, int]], dict[str, Any]], target: Any, batch: Callable[..., Any]) -> Iterator[Any]:
    rows, fields = case
    _, device, types = target
    for dtype in types:
        yield batch(rows, **fields).to(device, dtype)


@pytest.mark.parametrize("name", list(CASES))
def test_log_sum_exp_equals_the_reference(name: str, target: Any, batch: Callable[..., Any]) -> None:
    # test_invariant.py has the other two for batch-invariant operations.
    skip_in_interpreter(
        target, name not in (("chunks-window",) if invariant(target) else ("decode", "chunks-window", "trees"))
    )
    for case in cases(CASES[name], target, batch):
        want = reference(case)
        near(with_lse(target[0], case, case.view, case.step), want, case.q.dtype)
        if interpreted(target):
            continue
        # The same step is asked with and without it, with what it keeps of the call before.
        out, _ = target[0].attention.attend(case.q, case.k, case.v, case.view, case.step)
        seen = torch.isfinite(want[1][:, 0])
        assert (out[seen].double() - want[0][seen]).norm() < 1e-2 * want[0][seen].norm()
        near(with_lse(target[0], case, case.view, case.step), want, case.q.dtype)


@pytest.mark.parametrize(("name", "count"), PARTS)
def test_merged_parts_equal_attention_over_all_keys(
    name: str, count: int, target: Any, batch: Callable[..., Any]
) -> None:
    skip_in_interpreter(target, (name, count) != (("decode", 2) if invariant(target) else ("decode-softcap", 3)))
    for case in cases(CASES[name], target, batch):
        pages = case.view.table.shape[1]
        cuts = [pages * part // count for part in range(count + 1)]
        steps = [keys_of_pages(case, first, stop) for first, stop in pairwise(cuts)]
        parts = [with_lse(target[0], case, view, step) for view, step in steps]
        if int(case.step.length.min()) <= cuts[-2] * case.view.page_tokens:
            assert torch.isinf(parts[-1][1]).any(), "some tokens see nothing of the last part"
        want = reference(case)
        near(merge_attention(parts), want, case.q.dtype)
        near(merge_attention(parts[::-1]), want, case.q.dtype)


@pytest.mark.parametrize("name", WITH_PREFIX)
def test_a_prefix_merges_with_rows_of_several_query_tokens(name: str, target: Any, batch: Callable[..., Any]) -> None:
    """Chains and trees of drafts see one another in the last part; what lies before is the same for all of them."""
    skip_in_interpreter(target, name == "trees")
    for case in cases(CASES[name], target, batch):
        prefix = [with_lse(target[0], case, *keys_of_pages(case, first, stop)) for first, stop in ((0, 1), (1, 3))]
        parts = [*prefix, with_lse(target[0], case, *keys_behind(case, 3))]
        near(merge_attention(parts), reference(case), case.q.dtype)


@pytest.mark.parametrize("name", ["decode", "decode-window", "chunks-window", "trees"])
def test_sinks_join_the_sum(name: str, target: Any, batch: Callable[..., Any]) -> None:
    """A sink is a part of the keys whose values are 0. A small one changes nothing; a large one takes nearly all."""
    skip_in_interpreter(target, name != "decode-window" or invariant(target))
    for case in cases(CASES[name], target, batch):
        out, lse = reference(case)
        sinks = torch.linspace(-9.0, 9.0, out.shape[1], device=out.device)
        sink = torch.zeros_like(out), sinks.to(lse.dtype).expand_as(lse)
        attend = with_sinks(target[0].attention.attend, sinks)
        got, sum_with_sinks = attend(case.q, case.k, case.v, case.view, case.step, True)
        assert sum_with_sinks is not None
        want, want_lse = merge_attention([(out, lse), sink])
        assert got.dtype == case.q.dtype
        assert (got.double() - want).norm() < {torch.float32: 1e-5, torch.bfloat16: 1e-2}[case.q.dtype] * want.norm()
        torch.testing.assert_close(sum_with_sinks.double(), want_lse, atol=1e-3, rtol=1e-5)
        again, no_sum = attend(case.q, case.k, case.v, case.view, case.step)
        assert no_sum is None and torch.equal(again, got)


def random_part(tokens: int = 3, dtype: torch.dtype = torch.float32) -> Part:
    return torch.randn(tokens, 4, 8).to(dtype), torch.randn(tokens, 4) * 10


EMPTY: Part = (torch.zeros(3, 4, 8), torch.full((3, 4), float("-inf")))


def test_empty_parts_change_nothing() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        only = random_part(dtype=dtype)
        empty = EMPTY[0].to(dtype), EMPTY[1]
        for parts in ([only], [empty, only], [only, empty], [empty, only, empty]):
            out, lse = merge_attention(parts)
            assert torch.equal(out, only[0]) and torch.equal(lse, only[1]) and out.dtype == dtype
        out, lse = merge_attention([empty, empty])
        assert torch.equal(out, empty[0]) and torch.equal(lse, empty[1])


def test_merge_follows_the_formula_in_any_order() -> None:
    parts = [random_part(), random_part(), EMPTY, random_part()]
    wide = torch.stack([lse for _, lse in parts]).double()
    want_lse = torch.logsumexp(wide, 0)
    want = sum(torch.exp(lse - want_lse).unsqueeze(-1) * out for (out, _), lse in zip(parts, wide, strict=True))
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        out, lse = merge_attention([parts[at] for at in order])
        torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-6)


def test_merging_in_steps_equals_merging_at_once() -> None:
    parts = [random_part() for _ in range(4)]
    halves = [merge_attention(parts[:2]), merge_attention(parts[2:])]
    for actual, want in zip(merge_attention(halves), merge_attention(parts), strict=True):
        torch.testing.assert_close(actual, want, atol=1e-5, rtol=1e-5)
