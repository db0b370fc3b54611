"""Batch-invariant attention: a query's result depends on its own slots, not on its row's other queries or other rows.

A query's slots are cut into runs that begin at multiples of a length; that length depends on the query's own slot alone
(`_class`: short runs for short contexts, at most RUNS of them). Each run has a softmax of its own, tile of keys by tile
of keys; runs are merged in their order. A row of few queries has its runs computed by several programs, another kernel
merges what they leave (flash decoding, Dao et al. 2023); a longer one is tiled over queries, and a tile's program walks
over the runs and merges as it goes. Both are the same kernel, the same tile and the same function that merges, so which
way a row goes, which chunk a query came in, and what stood before it in the cache already change no bit: decoding, a
chunk of a prompt, a prefix hit and a recomputation after preemption agree by construction.

Slots that a query does not see are neutral: their weight is 0, a merge with a run of nothing changes nothing.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.triton.launch import await_inputs, overlap
from ridgeline.ops.triton.tuning import PLAN_ROWS, Tile
from ridgeline.ops.triton.vectors import as_computed, load_keys_values, pages_of_tile
from ridgeline.ops.triton.walk import LN2, LOG2E, STEP_SIZES, _seen
from ridgeline.ops.triton.walk_arguments import empty_results, padded_width, walk_arguments

PARTS_AT_ONCE = 8
# Padded head size -> tile. As few queries as the matrix unit takes, because decoding rows fill few of them. The load of a
# key's page number takes every other stage, so that 5 keep two tiles of keys and values in flight.
TILES = {
    16: Tile(64, 64, 4, 5),
    32: Tile(64, 64, 4, 5),
    64: Tile(64, 64, 4, 5),
    128: Tile(64, 64, 4, 5),
    256: Tile(64, 32, 8, 2),
}
FLOAT32_TILE = Tile(16, 32, 4, 1)


@triton.jit
def _class(slot, RUN: tl.constexpr, RUNS: tl.constexpr):
    """How often the runs of a query at `slot` are doubled: the least number for which RUNS of them suffice."""
    over = slot // (RUN * RUNS)
    doublings = (over >= 1).to(tl.int32)
    for bit in tl.static_range(1, 20):
        doublings += (over >= (1 << bit)).to(tl.int32)
    return doublings


@triton.jit
def _merge(best, weight, out, run_best, run_weight, run_out):
    """A running softmax and that of a later run as one; best, weight [N], out [N, WIDTH] (Milakov and Gimelshein 2018).
    Fused multiply-adds are spelled out, so that no compiler chooses where they are."""
    top = tl.maximum(best, run_best)
    safe = tl.where(top == float("-inf"), 0.0, top)
    shrink, share = tl.exp2(best - safe), tl.exp2(run_best - safe)
    weight = tl.fma(weight, shrink, run_weight * share)
    shrink, share = tl.broadcast_to(shrink[:, None], out.shape), tl.broadcast_to(share[:, None], out.shape)
    return top, weight, tl.fma(out, shrink, run_out * share)


@triton.jit
def _finish(best, weight, out):
    """(out / weight, log-sum-exp); queries that saw nothing give 0 and minus infinity."""
    some = weight > 0.0
    lse = tl.where(some, (best + tl.log2(tl.where(some, weight, 1.0))) * LN2, float("-inf"))
    return out / tl.where(some, weight, 1.0)[:, None], lse


@triton.jit(do_not_specialize=["rows", "units", "spare", "group", "few"])
def plan_kernel(
    q_start_ptr,
    length_ptr,
    units_ptr,
    per_row_ptr,
    rows,
    units,
    spare,
    group,
    few,
    window: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """units [3, units]: row (rows or more: nothing to do), first packed query, run (-1: all of them). per_row [2, rows]:
    first unit, units if it is split, else 0.

    Rows of at most `few` packed queries with at least as many runs as such rows have on average are split, while
    `spare` units suffice for all their runs but one each; every other row is cut into tiles of QUERIES.
    """
    await_inputs(PDL)
    row = tl.arange(0, ROWS)
    real = row < rows
    first_query = tl.load(q_start_ptr + row, mask=real, other=0)
    n = tl.load(q_start_ptr + row + 1, mask=real, other=0) - first_query
    length = tl.load(length_ptr + row, mask=real, other=0)
    valid = (n > 0) & (length >= n)
    low = tl.zeros((ROWS,), tl.int32)
    if window > 0:
        low = tl.maximum(length - n - window + 1, 0) // KEYS * KEYS
    doubled = _class(length - 1, RUN, RUNS)
    run = RUN << doubled
    first_run = low // run
    runs = (length + run - 1) // run - first_run
    may = valid & (n * group <= few) & (_class(length - n, RUN, RUNS) == doubled)
    all_runs, all_rows = tl.sum(tl.where(may, runs, 0), 0), tl.sum(may.to(tl.int32), 0)
    wants = may & (runs > 1) & (runs * all_rows >= all_runs)
    cut = wants & (tl.cumsum(tl.where(wants, runs - 1, 0), 0) <= spare)
    count = tl.where(cut, runs, tl.where(valid, (n * group + QUERIES - 1) // QUERIES, 0))
    stop = tl.cumsum(count, 0)
    if tl.program_id(0) == 0:
        tl.store(per_row_ptr + row, stop - count, mask=real)
        tl.store(per_row_ptr + rows + row, tl.where(cut, count, 0), mask=real)
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    owner = tl.sum((stop[None, :] <= unit[:, None]).to(tl.int32), 1)
    is_owner = row[None, :] == owner[:, None]
    within = unit - tl.sum(tl.where(is_owner, (stop - count)[None, :], 0), 1)
    is_cut = tl.sum(tl.where(is_owner, cut.to(tl.int32)[None, :], 0), 1) > 0
    own_run = within + tl.sum(tl.where(is_owner, first_run[None, :], 0), 1)
    inside = unit < units
    tl.store(units_ptr + unit, owner, mask=inside)
    tl.store(units_ptr + units + unit, tl.where(is_cut, 0, within * QUERIES), mask=inside)
    tl.store(units_ptr + 2 * units + unit, tl.where(is_cut, own_run, -1), mask=inside)


@triton.jit(do_not_specialize=[*STEP_SIZES, "part_queries"])
def invariant_kernel(
    q_ptr,
    kv_ptr,
    scales_ptr,
    table_ptr,
    rows_ptr,
    q_start_ptr,
    length_ptr,
    position_ptr,
    ancestors_ptr,
    key_positions_ptr,
    units_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_best_ptr,
    part_weight_ptr,
    q_token_stride,
    q_head_stride,
    page_stride,
    kind_stride,
    head_stride,
    scale_page_stride,
    table_stride,
    key_positions_stride,
    scale,
    cap,
    batch,
    units,
    part_queries,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    page_tokens: tl.constexpr,
    window: tl.constexpr,
    BITS: tl.constexpr,
    SCALES: tl.constexpr,
    TREE: tl.constexpr,
    COMPACTED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One tile of a row's packed queries and one KV head, over all its runs or over one of them."""
    await_inputs(PDL)
    # Later tiles see more slots: they start first, so that the short ones fill the end.
    unit = units - 1 - tl.program_id(0) // kv_heads
    head = tl.program_id(0) % kv_heads
    index = tl.load(units_ptr + unit)
    if index >= batch:
        return
    first_packed = tl.load(units_ptr + units + unit)
    only = tl.load(units_ptr + 2 * units + unit)
    row = tl.load(rows_ptr + index).to(tl.int64)
    first_query = tl.load(q_start_ptr + index)
    n = tl.load(q_start_ptr + index + 1) - first_query
    start = tl.load(length_ptr + index) - n
    packed = first_packed + tl.arange(0, QUERIES)
    place = packed // group
    real = place < n
    at = tl.arange(0, WIDTH)
    tile = real[:, None] & (at < head_dim)[None, :]
    token = (first_query + place).to(tl.int64)
    query_head = head * group + packed % group
    q = tl.load(
        q_ptr + token[:, None] * q_token_stride + query_head[:, None] * q_head_stride + at[None, :],
        mask=tile,
        other=0.0,
    )
    q = as_computed(q, BITS)
    own_position = tl.load(position_ptr + token, mask=real, other=0)
    own_ancestors = token
    if TREE:
        own_ancestors = tl.load(ancestors_ptr + token, mask=real, other=0)
    pages_ptr = table_ptr + row * table_stride
    head_ptr = kv_ptr + head.to(tl.int64) * head_stride
    scale_head_stride: tl.constexpr = page_tokens * SCALES
    scale_kind_stride: tl.constexpr = kv_heads * scale_head_stride
    head_scales_ptr = scales_ptr + head.to(tl.int64) * scale_head_stride
    end = start + tl.minimum((first_packed + QUERIES - 1) // group, n - 1) + 1
    first_slot = start + first_packed // group
    low = 0
    if window > 0 and COMPACTED == 0:
        # A draft tree's tokens may have been said right after the root, whatever their slot.
        reach = start if TREE else first_slot
        low = tl.maximum(reach - window + 1, 0) // KEYS * KEYS
    own_class = _class(start + place, RUN, RUNS)
    # Nearly always one turn: a tile's queries rarely lie on both sides of a slot from which on runs are longer.
    for doubled in range(_class(first_slot, RUN, RUNS), _class(end - 1, RUN, RUNS) + 1):
        run = RUN << doubled
        begin = tl.where(only >= 0, tl.maximum(only * run, low), low)
        stop = tl.where(only >= 0, tl.minimum((only + 1) * run, end), end)
        best = tl.full((QUERIES,), float("-inf"), tl.float32)
        weight = tl.zeros((QUERIES,), tl.float32)
        out = tl.zeros((QUERIES, WIDTH), tl.float32)
        run_best, run_weight, run_out = best, weight, out
        for first in range(begin, stop, KEYS):
            slot = first + tl.arange(0, KEYS)
            page = pages_of_tile(pages_ptr, slot, first, stop, page_tokens, KEYS)
            keys, values = load_keys_values(
                head_ptr, head_scales_ptr, page, slot % page_tokens, slot < stop, page_stride, kind_stride, scale_page_stride,
                scale_kind_stride, head_dim, BITS, SCALES, KEYS, WIDTH, q.dtype, True,
            )  # fmt: skip
            seen = _seen(
                slot, place, start, stop, own_position, own_ancestors, key_positions_ptr + row * key_positions_stride,
                position_ptr + first_query, n, window, TREE, COMPACTED,
            )  # fmt: skip
            scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
            if CAPPED:
                # tanh(x) = 2 sigmoid(2 x) - 1
                scores = cap * (2.0 * tl.sigmoid(2.0 * scores * (scale / cap)) - 1.0) * LOG2E
            else:
                scores = scores * (scale * LOG2E)
            scores = tl.where(seen, scores, float("-inf"))
            top = tl.maximum(run_best, tl.max(scores, 1))
            safe = tl.where(top == float("-inf"), 0.0, top)
            p = tl.exp2(scores - safe[:, None])
            shrink = tl.exp2(run_best - safe)
            run_weight = run_weight * shrink + tl.sum(p, 1)
            run_out = tl.dot(p.to(values.dtype), values, run_out * shrink[:, None], input_precision=PRECISION)
            run_best = top
            if (first + KEYS) % run == 0:
                best, weight, out = _merge(best, weight, out, run_best, run_weight, run_out)
                run_best = tl.full((QUERIES,), float("-inf"), tl.float32)
                run_weight = tl.zeros((QUERIES,), tl.float32)
                run_out = tl.zeros((QUERIES, WIDTH), tl.float32)
        best, weight, out = _merge(best, weight, out, run_best, run_weight, run_out)
        if only < 0:
            kept = real & (own_class == doubled)
            out, lse = _finish(best, weight, out)
            line = token * (kv_heads * group) + query_head
            target = out_ptr + line[:, None] * head_dim + at[None, :]
            tl.store(target, out.to(out_ptr.dtype.element_ty), mask=kept[:, None] & (at < head_dim)[None, :])
            tl.store(lse_ptr + line, lse, mask=kept)
        else:
            line = (unit.to(tl.int64) * kv_heads + head) * part_queries + packed
            tl.store(part_ptr + line[:, None] * head_dim + at[None, :], out, mask=tile)
            tl.store(part_best_ptr + line, best, mask=real)
            tl.store(part_weight_ptr + line, weight, mask=real)


@triton.jit(do_not_specialize=[*STEP_SIZES, "part_queries"])
def _combine_kernel(
    per_row_ptr,
    q_start_ptr,
    part_ptr,
    part_best_ptr,
    part_weight_ptr,
    out_ptr,
    lse_ptr,
    batch,
    part_queries,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    PDL: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One head of a row that was split: its runs merged in their order, one query token after the other."""
    await_inputs(PDL)
    index = tl.program_id(0)
    head = tl.program_id(1)
    count = tl.load(per_row_ptr + batch + index)
    if count == 0:
        return
    first_query = tl.load(q_start_ptr + index)
    n = tl.load(q_start_ptr + index + 1) - first_query
    first = tl.load(per_row_ptr + index)
    zero = tl.arange(0, 1)
    at = tl.arange(0, WIDTH)
    for place in range(n):
        packed = place * group + head % group
        best = tl.full((1,), float("-inf"), tl.float32)
        weight = tl.zeros((1,), tl.float32)
        out = tl.zeros((1, WIDTH), tl.float32)
        for done in range(0, count, PARTS):
            for part in tl.static_range(PARTS):
                inside = done + part + zero < count
                line = ((first + done + part).to(tl.int64) * kv_heads + head // group) * part_queries + packed + zero
                run_best = tl.load(part_best_ptr + line, mask=inside, other=float("-inf"))
                run_weight = tl.load(part_weight_ptr + line, mask=inside, other=0.0)
                tile = inside[:, None] & (at < head_dim)[None, :]
                run_out = tl.load(part_ptr + line[:, None] * head_dim + at[None, :], mask=tile, other=0.0)
                best, weight, out = _merge(best, weight, out, run_best, run_weight, run_out)
        out, lse = _finish(best, weight, out)
        line = (first_query + place).to(tl.int64) * (kv_heads * group) + head + zero
        target = out_ptr + line[:, None] * head_dim + at[None, :]
        tl.store(target, out.to(out_ptr.dtype.element_ty), mask=(at < head_dim)[None, :])
        tl.store(lse_ptr + line, lse)


@dataclass(frozen=True, slots=True)
class InvariantAttention:
    """See AttentionOps.attend. Results depend on `run` and `runs`, and not on `spare_programs`."""

    run: int = 256
    """Slots of the shortest runs; every tile's number of keys divides it."""
    runs: int = 32
    """Most runs of a query: from run * runs slots on, runs are twice as long, and so on."""
    spare_programs: int = 2048
    """Programs of a step that may be had by splitting rows."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        view: KvView,
        step: StepInputs,
        lse_needed: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See AttentionOps. Query tokens of no row are left as they come unless lse_needed; head sizes up to 256."""
        out, lse = empty_results(q, lse_needed)
        if not q.shape[0]:
            return out, lse
        rows, heads, dim = step.rows.shape[0], q.shape[1], q.shape[2]
        kv_heads, width = view.kv.shape[2], padded_width(dim)
        group = heads // kv_heads
        tile = FLOAT32_TILE if q.dtype == torch.float32 else TILES[width]
        # Packed queries of a row that may be split: one token's, or a few more where the host sees that there may be some.
        few = group if step.max_query == 1 else min(tile.queries, max(16, group))
        if group > tile.queries:
            few = 0
        units, per_row = self._plan(q, view, step, tile, few)
        count, queries = units.shape[1], max(1, few)
        part = torch.empty((count, kv_heads, queries, dim), dtype=torch.float32, device=q.device)
        best, weight = torch.empty((2, count, kv_heads, queries), dtype=torch.float32, device=q.device).unbind(0)
        parts = {"part_ptr": part, "part_best_ptr": best, "part_weight_ptr": weight, "part_queries": queries}
        results = {"out_ptr": out, "lse_ptr": lse, "batch": rows, **parts}
        invariant_kernel[(count * kv_heads,)](
            rows_ptr=step.rows,
            q_start_ptr=step.q_start,
            length_ptr=step.length,
            units_ptr=units,
            units=count,
            RUN=self.run,
            RUNS=self.runs,
            QUERIES=tile.queries,
            **results,
            **walk_arguments(tile, q, view, step),
        )
        if few:
            _combine_kernel[(rows, heads)](
                per_row_ptr=per_row,
                q_start_ptr=step.q_start,
                kv_heads=kv_heads,
                group=group,
                head_dim=dim,
                PARTS=PARTS_AT_ONCE,
                WIDTH=width,
                num_warps=1,
                **results,
                **overlap(q.device),
            )
        return out, lse

    def _plan(
        self, q: torch.Tensor, view: KvView, step: StepInputs, tile: Tile, few: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(units, per_row) of plan_kernel, once per step and group of layers alike. A graph under capture must record its own
        plan, so it shares none from before."""
        capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
        key = ("invariant", q.shape[1:], view.kv.shape[2], q.dtype, view.window, capturing)
        if (cached := step.derived.get(key)) is not None:
            return cached  # type: ignore[no-any-return]
        rows, kv_heads = step.rows.shape[0], view.kv.shape[2]
        group = q.shape[1] // kv_heads
        spare = max(1, self.spare_programs // kv_heads)
        count = rows + spare + q.shape[0] * group // tile.queries
        units = torch.empty((3, count), dtype=torch.int32, device=q.device)
        per_row = torch.empty((2, rows), dtype=torch.int32, device=q.device)
        block = 32
        plan_kernel[(triton.cdiv(count, block),)](
            step.q_start,
            step.length,
            units,
            per_row,
            rows,
            count,
            spare,
            group,
            few,
            window=0 if step.key_positions is not None else view.window or 0,
            QUERIES=tile.queries,
            KEYS=tile.keys,
            RUN=self.run,
            RUNS=self.runs,
            ROWS=next((size for size in PLAN_ROWS if size >= rows), triton.next_power_of_2(rows)),
            BLOCK=block,
            **overlap(q.device),
        )
        step.derived[key] = units, per_row
        return units, per_row
