"""Selection of pages on a GPU (Quest, Tang et al. 2024): the same rule as ops.selective, without synchronization, so that CUDA
graphs hold it.

A decode step runs three kernels per layer: upper bounds of each page's scores, choice of the pages with the largest ones, and the
split kernel of attention over them. For the last one each KV head of each row is a row of its own, with one KV head and its own
page table. A table entry says where the head's part of a page begins, in units that divide the strides of pages and of heads.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline.ops.step import KvView, Selection, StepInputs
from ridgeline.ops.table import AttentionOps, Heads, QkvShape
from ridgeline.ops.triton.launch import await_inputs, overlap
from ridgeline.ops.triton.walk_arguments import padded_width

NEWEST = tl.constexpr(2)
"""See ops.selective.NEWEST."""
SCORED_PAGES = 16
"""Pages of a program of the bounds kernel: 8 KB of minima and maxima of a head of 128."""
PAGES_PER_WARP = 512
"""Pages that a warp of the choice holds in registers, 16 per thread."""


@triton.jit
def _write_bounds(
    kv_ptr, bounds_ptr, slot, head, page_stride, head_stride, bounds_page_stride, kv_heads: tl.constexpr,
    head_dim: tl.constexpr, page_tokens: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write minimum and maximum of the keys of a head's page if `slot` int64 completes the page."""
    if slot % page_tokens == page_tokens - 1:
        page = slot // page_tokens
        at, place = tl.arange(0, WIDTH), tl.arange(0, TOKENS)
        source = kv_ptr + page * page_stride + head.to(tl.int64) * head_stride
        real = at < head_dim
        # A place beyond a page reads the last key once more.
        line = tl.minimum(place, page_tokens - 1)[:, None] * head_dim
        keys = tl.load(source + line + at[None, :], mask=real[None, :], other=0.0).to(tl.float32)
        target = bounds_ptr + page * bounds_page_stride + head * head_dim + at
        tl.store(target, tl.min(keys, 0).to(bounds_ptr.dtype.element_ty), mask=real)
        tl.store(target + kv_heads * head_dim, tl.max(keys, 0).to(bounds_ptr.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _bounds_kernel(
    kv_ptr,
    bounds_ptr,
    slots_ptr,
    page_stride,
    head_stride,
    bounds_page_stride,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_tokens: tl.constexpr,
    PDL: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Write the bounds of the pages that the step's tokens complete; the grid is [tokens, KV heads]."""
    await_inputs(PDL)
    slot = tl.load(slots_ptr + tl.program_id(0))
    _write_bounds(
        kv_ptr, bounds_ptr, slot, tl.program_id(1), page_stride, head_stride, bounds_page_stride, kv_heads, head_dim,
        page_tokens, WIDTH, TOKENS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["scores_stride"], do_not_specialize_on_alignment=["slots_ptr", "rows_ptr", "length_ptr"])
def _score_kernel(
    q_ptr,
    kv_ptr,
    bounds_ptr,
    table_ptr,
    slots_ptr,
    rows_ptr,
    length_ptr,
    scores_ptr,
    packed_ptr,
    q_token_stride,
    q_head_stride,
    page_stride,
    head_stride,
    bounds_page_stride,
    table_stride,
    scores_stride,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    page_tokens: tl.constexpr,
    WRITES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    PAGES: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Upper bounds of the scores of PAGES pages of a row with the query heads of a KV head; the grid is [KV heads, blocks of pages,
    rows].

    scores: float32 [rows, KV heads, scores_stride], not scaled, the largest of the query heads; undefined beyond the row's pages.
    The first block also copies the queries to packed [rows, heads, head_dim] and, with WRITES, writes the bounds of a page that the
    row's token completes. This step reads that page whatever its bounds are.
    """
    await_inputs(PDL)
    element: tl.constexpr = q_ptr.dtype.element_ty
    head = tl.program_id(0)
    block = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(length_ptr + row)
    held = (length + page_tokens - 1) // page_tokens
    at = tl.arange(0, WIDTH)
    query = tl.arange(0, QUERIES)
    tile = (query < group)[:, None] & (at < head_dim)[None, :]
    query_head = head * group + query
    source = q_ptr + row * q_token_stride + query_head[:, None] * q_head_stride + at[None, :]
    place = block * PAGES + tl.arange(0, PAGES)
    if block * PAGES < held:
        device_row = tl.load(rows_ptr + row).to(tl.int64)
        page = tl.load(table_ptr + device_row * table_stride + place, mask=place < held, other=0).to(tl.int64)
        line = bounds_ptr + page[:, None] * bounds_page_stride + head * head_dim + at[None, :]
        real = (place < held)[:, None] & (at < head_dim)[None, :]
        least = tl.load(line, mask=real, other=0.0)
        most = tl.load(line + kv_heads * head_dim, mask=real, other=0.0)
        # Minima and maxima of bfloat16 are float32.
        q = tl.load(source, mask=tile, other=0.0).to(tl.float32)
        positive, negative = tl.maximum(q, 0.0).to(element), tl.minimum(q, 0.0).to(element)
        scores = tl.dot(most.to(element), tl.trans(positive), input_precision=PRECISION)
        scores = tl.dot(least.to(element), tl.trans(negative), scores, input_precision=PRECISION)
        scores = tl.where((query < group)[None, :], scores, float("-inf"))
        tl.store(scores_ptr + (row * kv_heads + head) * scores_stride + place, tl.max(scores, 1), mask=place < held)
    if block == 0:
        target = packed_ptr + (row * kv_heads * group + query_head[:, None]) * head_dim + at[None, :]
        tl.store(target, tl.load(source, mask=tile, other=0.0), mask=tile)
        if WRITES:
            # A row without tokens, which pads the step, need not have a slot.
            slot = tl.load(slots_ptr + row, mask=length > 0, other=0)
            _write_bounds(
                kv_ptr, bounds_ptr, slot, head, page_stride, head_stride, bounds_page_stride, kv_heads, head_dim,
                page_tokens, WIDTH, TOKENS,
            )  # fmt: skip


@triton.jit
def _threshold(key, candidate, needed):
    """The largest value with at least `needed` candidate keys int32 from it on. Bisection between the smallest and the largest key,
    which ends early at a value with exactly as many."""
    low = tl.min(tl.where(candidate, key, 2147483647), 0).to(tl.int64)
    high = tl.max(tl.where(candidate, key, -2147483648), 0).to(tl.int64) + 1
    # From `low` on there are at least `needed`, from `high` on fewer.
    count = needed + 1
    while (high - low > 1) & (count != needed):
        middle = (low + high) >> 1
        count = tl.sum((candidate & (key >= middle.to(tl.int32))).to(tl.int32), 0)
        low = tl.where(count >= needed, middle, low)
        high = tl.where(count >= needed, high, middle)
    return low.to(tl.int32)


@triton.jit(do_not_specialize=["scores_stride"], do_not_specialize_on_alignment=["rows_ptr", "length_ptr"])
def _choose_kernel(
    scores_ptr,
    table_ptr,
    rows_ptr,
    length_ptr,
    chosen_ptr,
    read_ptr,
    table_stride,
    scores_stride,
    most: tl.constexpr,
    kv_heads: tl.constexpr,
    page_tokens: tl.constexpr,
    page_units: tl.constexpr,
    head_units: tl.constexpr,
    PDL: tl.constexpr,
    PAGES: tl.constexpr,
):
    """Choose the pages of one row and KV head per program; the grid is [rows * KV heads].

    The first page, the NEWEST last ones, and those with the largest scores, `most` in all; of equal scores the first pages. chosen:
    int32 [rows * KV heads, most], in the order of slots, each as page * page_units + head * head_units. read: int32 [rows * KV
    heads], the slots that they hold.
    """
    await_inputs(PDL)
    line = tl.program_id(0).to(tl.int64)
    row, head = line // kv_heads, tl.program_id(0) % kv_heads
    length = tl.load(length_ptr + row)
    held = (length + page_tokens - 1) // page_tokens
    tl.store(read_ptr + line, length - tl.maximum(held - most, 0) * page_tokens)
    device_row = tl.load(rows_ptr + row).to(tl.int64)
    place = tl.arange(0, PAGES)
    chosen = place < held
    if held > most:
        candidate = (place >= 1) & (place < held - NEWEST)
        bits = tl.load(scores_ptr + line * scores_stride + place, mask=candidate, other=0.0).to(tl.int32, bitcast=True)
        # Integers in the order of the scores.
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        needed = most - 1 - NEWEST
        threshold = _threshold(key, candidate, needed)
        best = candidate & (key >= threshold)
        if tl.sum(best.to(tl.int32), 0) > needed:
            equal = candidate & (key == threshold)
            above = candidate & (key > threshold)
            room = needed - tl.sum(above.to(tl.int32), 0)
            best = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
        chosen = chosen & (best | (place < 1) | (place >= held - NEWEST))
    page = tl.load(table_ptr + device_row * table_stride + place, mask=chosen, other=0)
    target = chosen_ptr + line * most + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(target, page * page_units + head * head_units, mask=chosen)


class _Units(NamedTuple):
    """Elements of a unit of table entries, and the units of a page and of a head's part."""

    elements: int
    page: int
    head: int

    @staticmethod
    def of(kv: torch.Tensor) -> _Units:
        size = math.gcd(kv.stride(0), kv.stride(2))
        return _Units(size, kv.stride(0) // size, kv.stride(2) // size)


def selects(selection: Selection | None, step: StepInputs) -> bool:
    """Whether the step's queries may read less than everything. The host knows it."""
    return selection is not None and step.decode and step.max_length > selection.budget


def write_bounds(view: KvView, selection: Selection) -> None:
    """See ops.selective.write_bounds."""
    kv, bounds, tokens = view.kv, selection.bounds, len(view.slots)
    if tokens:
        _bounds_kernel[(tokens, kv.shape[2])](
            kv,
            bounds,
            view.slots,
            kv.stride(0),
            kv.stride(2),
            bounds.stride(0),
            kv_heads=kv.shape[2],
            head_dim=kv.shape[4],
            page_tokens=view.page_tokens,
            WIDTH=padded_width(kv.shape[4]),
            TOKENS=triton.next_power_of_2(view.page_tokens),
            **overlap(kv.device),
        )


def choose_pages(
    q: torch.Tensor, view: KvView, selection: Selection, step: StepInputs, writes: bool
) -> tuple[torch.Tensor, torch.Tensor, StepInputs]:
    """The pages that each row reads for each KV head, as a step whose rows are the KV heads of the rows.

    writes: also write the bounds of the pages that the rows' tokens complete.
    Returns:
        queries [B * Hkv, group, d], page table int32 [B * Hkv, pages of the budget] in units of _Units, and the step.
    """
    kv_heads, size = view.kv.shape[2], view.page_tokens
    most = selection.budget // size
    packed, scores = _score(q, view, selection, step, writes)
    lines, pages = scores.shape
    narrowed = _narrowed(step, lines, most * size)
    table = torch.empty((lines, most), dtype=torch.int32, device=q.device)
    units, padded = _Units.of(view.kv), triton.next_power_of_2(pages)
    _choose_kernel[(lines,)](
        scores,
        view.table,
        step.rows,
        step.length,
        table,
        narrowed.length,
        view.table.stride(0),
        pages,
        most=most,
        kv_heads=kv_heads,
        page_tokens=size,
        page_units=units.page,
        head_units=units.head,
        PAGES=padded,
        num_warps=max(1, min(16, padded // PAGES_PER_WARP)),
        **overlap(q.device),
    )
    return packed, table, narrowed


def _score(
    q: torch.Tensor, view: KvView, selection: Selection, step: StepInputs, writes: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The queries [B * Hkv, group, d], copied, and the upper bounds of the pages' scores, float32 [B * Hkv, pages]."""
    kv, (rows, heads, dim) = view.kv, q.shape
    kv_heads, pages = kv.shape[2], triton.cdiv(step.max_length, view.page_tokens)
    group = heads // kv_heads
    packed = torch.empty((rows * kv_heads, group, dim), dtype=q.dtype, device=q.device)
    scores = torch.empty((rows * kv_heads, pages), dtype=torch.float32, device=q.device)
    _score_kernel[(kv_heads, triton.cdiv(pages, SCORED_PAGES), rows)](
        q,
        kv,
        selection.bounds,
        view.table,
        view.slots,
        step.rows,
        step.length,
        scores,
        packed,
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        kv.stride(2),
        selection.bounds.stride(0),
        view.table.stride(0),
        pages,
        kv_heads=kv_heads,
        group=group,
        head_dim=dim,
        page_tokens=view.page_tokens,
        WRITES=writes,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        PAGES=SCORED_PAGES,
        QUERIES=max(16, triton.next_power_of_2(group)),
        WIDTH=padded_width(dim),
        TOKENS=triton.next_power_of_2(view.page_tokens),
        **overlap(q.device),
    )
    return packed, scores


def _narrowed(step: StepInputs, rows: int, budget: int) -> StepInputs:
    """The step whose rows are the KV heads of the rows. All layers share it, and with it the plan of the split kernel; each writes
    the same lengths."""
    capturing = step.length.is_cuda and torch.cuda.is_current_stream_capturing()
    key = ("selective", rows, budget, capturing)
    known: StepInputs | None = step.derived.get(key)
    if known is None:
        count = torch.arange(rows + 1, dtype=torch.int32, device=step.length.device)
        length = torch.empty_like(count[:-1])
        known = StepInputs(count[:-1], count, length, count[:-1], count[:-1], 1, budget)
        step.derived[key] = known
    return known


def head_view(view: KvView, table: torch.Tensor) -> KvView:
    """The cache as pages of one KV head, for a table in units of _Units. Its shape does not say how many pages there are."""
    kv, size = view.kv, _Units.of(view.kv).elements
    pages = kv.as_strided((1, 2, 1, *kv.shape[3:]), (size, kv.stride(1), kv.stride(2), *kv.stride()[3:]))
    return replace(view, kv=pages, table=table, selection=None, chosen=True)


def selecting(whole: AttentionOps) -> AttentionOps:
    """`whole` with selection in layers with KvView.selection, for a cache in the model's dtype. See ops.selective.selecting."""

    def qkv_write(qkv: torch.Tensor, shape: QkvShape, view: KvView, step: StepInputs) -> Heads:
        heads = whole.qkv_write(qkv, shape, view, step)
        if view.selection is not None and shape.n_kv_heads and not selects(view.selection, step):
            write_bounds(view, view.selection)
        return heads

    def attend(
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        view: KvView,
        step: StepInputs,
        lse_needed: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        selection = view.selection
        if selection is None or not selects(selection, step):
            return whole.attend(q, k, v, view, step, lse_needed)
        # In the last layer of a step with prompts the queries are fewer than the tokens, whose bounds are written.
        writes = k is not None and len(view.slots) == len(q)
        queries, table, narrowed = choose_pages(q, view, selection, step, writes)
        out, lse = whole.attend(queries, None, None, head_view(view, table), narrowed, lse_needed)
        return out.view(q.shape), None if lse is None else lse.view(q.shape[:2])

    return replace(whole, qkv_write=qkv_write, attend=attend)
