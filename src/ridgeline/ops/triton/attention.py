"""Paged attention for ragged batches: the launches, and what a step's layers share. The kernels: walk, plan.

Two kernels serve one step. Rows whose query tokens, packed with the query heads of a KV group, fit a small tile
(decoding, verification of drafts) are split along their keys and combined by log-sum-exp (flash decoding, Dao et al.
2023); longer chunks are tiled over queries (FlashAttention-2, Dao 2023). Each kernel skips the other's rows on the
device. Which program does what is written by a plan kernel from lengths on the device, once per step and group, so grids
depend on shapes alone and everything may live in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import triton

from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.triton import tuning
from ridgeline.ops.triton.launch import overlap
from ridgeline.ops.triton.plan import plan_kernel
from ridgeline.ops.triton.tuning import Tile
from ridgeline.ops.triton.walk import chunk_kernel, combine_kernel, split_kernel


@cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; the interpreter gets few, so that tests see rows both split and whole."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 6


@dataclass(frozen=True, slots=True)
class _Work:
    """Units of work on the device. units: int32 [3, n] (row, begin, end); rows: int32 [2, B] (first unit, units)."""

    units: torch.Tensor
    rows: torch.Tensor

    @property
    def count(self) -> int:
        return self.units.shape[1]


@dataclass(frozen=True, slots=True)
class _Call:
    """One attention call's shapes. small: packed queries up to which a row belongs to the split kernel."""

    q: torch.Tensor
    view: KvView
    step: StepInputs
    small: int

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.view.kv.shape[2]

    @property
    def compacted(self) -> bool:
        return self.step.key_positions is not None

    @property
    def width(self) -> int:
        return max(16, triton.next_power_of_2(self.q.shape[2]))

    def tile(self, split: bool) -> Tile:
        if self.q.dtype == torch.float32:
            return tuning.FLOAT32_SPLIT if split else tuning.FLOAT32_CHUNK
        if split:
            return tuning.SPLIT_TILES[self.width]
        short = self.step.max_query <= tuning.LONGEST_SHORT_CHUNK
        return (tuning.SHORT_CHUNK_TILES if short else tuning.CHUNK_TILES)[self.width]


def _once(call: _Call, name: str, make: Callable[[], _Work]) -> _Work:
    """`make()` once per step and group. A graph under capture must record its own plan, so it shares none from before."""
    capturing = call.q.is_cuda and torch.cuda.is_current_stream_capturing()
    shape = (call.q.shape[1], call.view.kv.shape[2], call.q.shape[2], call.q.dtype, call.view.window)
    key = ("triton", name, shape, capturing)
    found = call.step.derived.get(key)
    if found is None:
        found = call.step.derived[key] = make()
    return found  # type: ignore[no-any-return]


def _plan(call: _Call, split: bool) -> _Work:
    """Write the units of the split kernel (runs of slots of a row) or of the chunk kernel (runs of packed queries)."""
    step, device, tile = call.step, call.q.device, call.tile(split)
    rows, kv_heads = step.rows.shape[0], call.view.kv.shape[2]
    tokens = call.q.shape[0]
    if split:
        wave = _processors(device) * tuning.SPLIT_PROGRAMS_PER_PROCESSOR
        waves = 1 if rows * kv_heads < wave else tuning.SPLIT_WAVES
        spare = max(1, wave * waves // kv_heads)
        if waves == 1:
            spare = max(1, spare - rows)
        count = rows + spare
    else:
        spare = triton.cdiv(tokens * call.group, tile.queries)
        # Each row with so many tokens that it belongs here may end with a tile that is not full.
        count = min(rows, tokens // (call.small // call.group + 1)) + spare
    units = torch.empty((3, count), dtype=torch.int32, device=device)
    per_row = torch.empty((2, rows), dtype=torch.int32, device=device)
    block = 32
    plan_kernel[(triton.cdiv(count, block),)](
        step.q_start,
        step.length,
        units,
        per_row,
        rows,
        count,
        spare,
        call.group,
        call.small,
        window=0 if call.compacted else call.view.window or 0,
        tile=tile.keys if split else tile.queries,
        smallest=tuning.SMALLEST_SPLIT if call.q.is_cuda else tile.keys,
        SPLIT=split,
        ROWS=_class(rows, tuning.PLAN_ROWS),
        BLOCK=block,
        **overlap(device),
    )
    return _Work(units, per_row)


def _class(value: int, classes: tuple[int, ...]) -> int:
    """The smallest class that holds `value`, beyond them the next power of two: few classes, few compilations."""
    return next((one for one in classes if one >= value), triton.next_power_of_2(value))


def _shared(call: _Call, split: bool) -> dict[str, object]:
    """Arguments that both kernels take by name."""
    view, step, tile = call.view, call.step, call.tile(split)
    absent = step.position
    return {
        "q_ptr": call.q,
        "kv_ptr": view.kv,
        "table_ptr": view.table,
        "rows_ptr": step.rows,
        "q_start_ptr": step.q_start,
        "length_ptr": step.length,
        "position_ptr": step.position,
        "ancestors_ptr": absent if step.ancestors is None else step.ancestors,
        "key_positions_ptr": absent if step.key_positions is None else step.key_positions,
        "q_token_stride": call.q.stride(0),
        "q_head_stride": call.q.stride(1),
        "page_stride": view.kv.stride(0),
        "kind_stride": view.kv.stride(1),
        "head_stride": view.kv.stride(2),
        "table_stride": view.table.stride(0),
        "key_positions_stride": 0 if step.key_positions is None else step.key_positions.stride(0),
        "scale": view.scale,
        "cap": 0.0 if view.softcap is None else view.softcap,
        "batch": step.rows.shape[0],
        "kv_heads": view.kv.shape[2],
        "group": call.group,
        "head_dim": call.q.shape[2],
        "page_tokens": view.page_tokens,
        "window": view.window or 0,
        "TREE": step.ancestors is not None,
        "COMPACTED": call.compacted,
        "CAPPED": view.softcap is not None,
        "PRECISION": "ieee" if call.q.dtype == torch.float32 else "tf32",
        "KEYS": tile.keys,
        "WIDTH": call.width,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **overlap(call.q.device),
    }


def _split(call: _Call, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Rows with few query tokens: parts of their keys in parallel, then the parts of a row together."""
    work = _once(call, "split", lambda: _plan(call, split=True))
    kv_heads, dim = call.view.kv.shape[2], call.q.shape[2]
    queries = call.small // call.group * call.group
    part = torch.empty((work.count, kv_heads, queries, dim), dtype=torch.float32, device=out.device)
    part_lse = torch.empty((work.count, kv_heads, queries), dtype=torch.float32, device=out.device)
    split_kernel[(work.count * kv_heads,)](
        units_ptr=work.units,
        per_row_ptr=work.rows,
        out_ptr=out,
        lse_ptr=lse,
        part_ptr=part,
        part_lse_ptr=part_lse,
        units=work.count,
        part_queries=queries,
        QUERIES=max(16, triton.next_power_of_2(queries)),
        **_shared(call, split=True),
    )
    rows = call.step.rows.shape[0]
    combine_kernel[(rows, call.q.shape[1])](
        work.rows,
        call.step.q_start,
        part,
        part_lse,
        out,
        lse,
        rows,
        part_queries=queries,
        kv_heads=kv_heads,
        group=call.group,
        head_dim=dim,
        PARTS=tuning.COMBINED_AT_ONCE,
        WIDTH=call.width,
        num_warps=2,
        **overlap(out.device),
    )


def _chunks(call: _Call, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Rows with many query tokens: one program per tile of packed queries and KV head."""
    work = _once(call, "chunks", lambda: _plan(call, split=False))
    chunk_kernel[(work.count * call.view.kv.shape[2],)](
        units_ptr=work.units,
        out_ptr=out,
        lse_ptr=lse,
        units=work.count,
        QUERIES=call.tile(split=False).queries,
        **_shared(call, split=False),
    )


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, view: KvView, step: StepInputs
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See Ops. Query tokens of no row are left as they come; head sizes up to 256."""
    group = q.shape[1] // view.kv.shape[2]
    packed = step.max_query * group
    few = packed <= tuning.LARGEST_SPLIT_QUERIES
    # Not the exact number: each would be a kernel of its own.
    small = group if step.max_query == 1 else max(tuning.SPLIT_QUERIES, group)
    if few and packed > small:
        small = tuning.LARGEST_SPLIT_QUERIES
    call = _Call(q, view, step, small)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if q.shape[0]:
        _split(call, out, lse)
        if not few:
            _chunks(call, out, lse)
    return out, lse
