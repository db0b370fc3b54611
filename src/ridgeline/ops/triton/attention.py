"""Paged attention for ragged batches: the launches, and what a step's layers share. The kernels: walk, plan, chunk, hopper.

Two kernels serve one step. Rows whose query tokens, packed with the query heads of a KV group, fit a small tile
(decoding, verification of drafts) are split along their keys and combined by log-sum-exp (flash decoding, Dao et al.
2023); longer chunks are tiled over queries (FlashAttention-2, Dao 2023; on Hopper FlashAttention-3, Shah et al. 2024).
Each kernel skips the other's rows on the device. Which program does what is written by a plan kernel from lengths on the
device, once per step and group, so grids depend on shapes alone and everything may live in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch
import triton

from ridgeline.ops.step import SHORT, KvView, StepInputs
from ridgeline.ops.triton import hopper, tuning
from ridgeline.ops.triton.chunk import UNIT_FIELDS as CHUNK_FIELDS
from ridgeline.ops.triton.chunk import chunk_kernel, chunk_plan_kernel
from ridgeline.ops.triton.launch import is_hopper, overlap
from ridgeline.ops.triton.plan import UNIT_FIELDS, plan_kernel
from ridgeline.ops.triton.tuning import Tile
from ridgeline.ops.triton.walk import combine_kernel, split_kernel


@cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; the interpreter gets few, so that tests see rows both split and whole."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 6


Plan = TypeVar("Plan")


@dataclass(frozen=True, slots=True)
class _Work:
    """The split kernel's plan on the device, see plan_kernel. units: int32 [UNIT_FIELDS, n]. rows: int32 [2, B].
    arrivals: int32 [B, Hkv], zero between two layers."""

    units: torch.Tensor
    rows: torch.Tensor
    arrivals: torch.Tensor

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
    lse_needed: bool = False

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.view.kv.shape[2]

    @property
    def compacted(self) -> bool:
        return self.step.key_positions is not None

    @property
    def width(self) -> int:
        return max(16, triton.next_power_of_2(self.q.shape[2]))

    @property
    def on_hopper(self) -> bool:
        """Whether the chunks are hopper's: in order of slots, with heads and pages that its copies take. It reads no positions,
        which say how far from its keys a query is where these are a part of a row's."""
        step = self.step
        plain = step.ancestors is None and not self.compacted and not self.lse_needed
        long = step.max_query >= hopper.SHORTEST_CHUNK.get(self.q.shape[2], step.max_query + 1)
        return plain and long and hopper.takes(self.q, self.view)

    @property
    def programs(self) -> int:
        """Of the split kernel, if no row is split."""
        return self.step.rows.shape[0] * self.view.kv.shape[2]

    @property
    def sparse(self) -> bool:
        """Whether rows and heads alone leave processors idle; with many queries each, whether they do not fill one wave. Then a row
        has many parts, as many as run at a time, and a kernel of its own, ready when the last part is, puts them together in half
        the time; else the last program of a row does."""
        return self.programs < (_processors(self.q.device) if self.small <= tuning.SPLIT_QUERIES else self.wave)

    @property
    def few(self) -> bool:
        """Whether each of them may have a processor for itself."""
        return self.small <= tuning.SPLIT_QUERIES and self.sparse

    @property
    def wide(self) -> bool:
        """Whether each has one, and fills it."""
        return self.few and self.width in tuning.WIDE_SPLIT_TILES and self.step.rows.shape[0] >= tuning.FEWEST_WIDE_ROWS

    @property
    def lone(self) -> bool:
        """Whether one or two rows of long contexts leave room for the next layer's programs beside their own. Steps that only
        decode, as below."""
        return self.few and not self.wide and self.step.max_query == 1 and self.step.max_length > SHORT

    @property
    def snug(self) -> bool:
        """Whether all rows and heads run at a time, but only if a processor takes one program more than else. Steps that
        only decode: their kernels are compiled before requests come, those of mixed steps for any number of rows."""
        least, most = tuning.SPLIT_PROGRAMS_PER_PROCESSOR, tuning.SNUG_PROGRAMS_PER_PROCESSOR
        programs, processors = self.programs, _processors(self.q.device)
        fits = self.step.max_query == 1 and self.group <= tuning.SPLIT_QUERIES and self.width in tuning.SNUG_SPLIT_TILES
        return fits and least * processors <= programs < most * processors

    @property
    def wave(self) -> int:
        """Programs of the split kernel that run at a time."""
        each = tuning.SNUG_PROGRAMS_PER_PROCESSOR if self.snug else tuning.SPLIT_PROGRAMS_PER_PROCESSOR
        if self.wide or self.lone:
            each = 1 if self.wide else tuning.LONE_PROGRAMS_PER_PROCESSOR
        return _processors(self.q.device) * each

    @property
    def spare(self) -> int:
        """Parts that there may be beyond one of each row. Where all rows would run at a time, the longest of them would end long
        after the others: so there is a wave of parts more."""
        waves = 1 if self.programs < self.wave else tuning.SPLIT_WAVES
        units = self.wave * waves // self.view.kv.shape[2]
        return max(1, units - self.step.rows.shape[0] if self.sparse else units)

    @property
    def smallest(self) -> int:
        """Slots below which a part of a row is not cut further. Steps that only decode have about as many rows as are said; those
        of a graph of mixed steps may be few, and parts of a few are worth their price."""
        if self.step.max_query == 1:
            many = not self.sparse and self.programs >= self.wave
            return tuning.SMALLEST_OF_MANY if many else tuning.SMALLEST_SPLIT
        verifies = self.step.max_query * self.group <= self.small
        return tuning.SMALLEST_VERIFIED_SPLIT if verifies else tuning.SMALLEST_SPLIT

    @property
    def early(self) -> bool:
        """Whether programs of several rows ask for keys before the wait though others share their processors. Steps that only
        decode, as below."""
        if self.step.max_query > 1 or self.group > tuning.SPLIT_QUERIES or self.step.rows.shape[0] == 1:
            return False
        few = self.programs <= tuning.MOST_EARLY_PROGRAMS * _processors(self.q.device)
        return few and not (self.wide or self.lone) and self.tile(split=True).registers is not None

    @property
    def ahead(self) -> int:
        """Slots that a program of the split kernel asks for before it waits for the kernel before it; 0: none."""
        tile, plain = self.tile(split=True), self.step.ancestors is None and not self.compacted
        return tile.stages * tile.keys if (self.wide or self.lone or self.early) and plain else 0

    def tile(self, split: bool) -> Tile:
        if self.q.dtype == torch.float32:
            return tuning.FLOAT32_SPLIT if split else tuning.FLOAT32_CHUNK
        if split:
            tiles = tuning.SNUG_SPLIT_TILES if self.snug else tuning.SPLIT_TILES
            return (tuning.WIDE_SPLIT_TILES if self.wide else tiles)[self.width]
        if self.on_hopper:
            return Tile(hopper.QUERIES, hopper.KEYS[self.q.shape[2]], 4 * hopper.GROUPS, hopper.STAGES)
        if self.step.max_query <= tuning.LONGEST_SHORT_CHUNK:
            return tuning.SHORT_CHUNK_TILES[self.width]
        tile = tuning.CHUNK_TILES[self.width]
        return tuning.WIDE_CHUNK_TILES.get(self.width, tile) if is_hopper(self.q.device) else tile


def _key(call: _Call, name: str) -> Hashable:
    """Of a plan in step.derived. A graph under capture must record its own plan, so it shares none from before."""
    capturing = call.q.is_cuda and torch.cuda.is_current_stream_capturing()
    shape = (call.q.shape[1], call.view.kv.shape[2], call.q.shape[2], call.q.dtype, call.view.window)
    return ("triton", name, shape, capturing)


def _once(call: _Call, name: str, make: Callable[[], Plan]) -> Plan:
    """`make()` once per step and group."""
    key = _key(call, name)
    found = call.step.derived.get(key)
    if found is None:
        found = call.step.derived[key] = make()
    return found  # type: ignore[no-any-return]


def _plan(call: _Call) -> _Work:
    """Write the units of the split kernel: runs of slots of a row."""
    step, device, tile, spare = call.step, call.q.device, call.tile(split=True), call.spare
    rows, kv_heads = step.rows.shape[0], call.view.kv.shape[2]
    count = rows + spare
    units = torch.empty((UNIT_FIELDS, count), dtype=torch.int32, device=device)
    per_row = torch.empty((2, rows), dtype=torch.int32, device=device)
    arrivals = torch.empty((rows, kv_heads), dtype=torch.int32, device=device)
    block = 16
    plan_kernel[(triton.cdiv(rows, block),)](
        step.rows,
        step.q_start,
        step.length,
        units,
        per_row,
        arrivals,
        rows,
        count,
        spare,
        call.group,
        call.small,
        call.smallest if call.q.is_cuda else tile.keys,
        kv_heads=kv_heads,
        window=0 if call.compacted else call.view.window or 0,
        tile=tile.keys,
        FINER=call.sparse,
        ROWS=_class(rows, tuning.PLAN_ROWS),
        BLOCK=block,
        **overlap(device),
    )
    return _Work(units, per_row, arrivals)


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
    planned = _key(call, "split") in call.step.derived
    work = _once(call, "split", lambda: _plan(call))
    rows, kv_heads, dim = call.step.rows.shape[0], call.view.kv.shape[2], call.q.shape[2]
    queries = call.small // call.group * call.group
    packed = triton.next_power_of_2(queries)
    part = torch.empty((work.count, kv_heads, queries, dim), dtype=torch.float32, device=out.device)
    part_lse = torch.empty((work.count, kv_heads, queries), dtype=torch.float32, device=out.device)
    split_kernel[(work.count * kv_heads,)](
        units_ptr=work.units,
        arrivals_ptr=work.arrivals,
        out_ptr=out,
        lse_ptr=lse,
        part_ptr=part,
        part_lse_ptr=part_lse,
        units=work.count,
        planned=int(planned),
        part_queries=queries,
        QUERIES=max(16, packed),
        AHEAD=call.ahead,
        FUSED=not call.sparse,
        maxnreg=call.tile(split=True).registers if call.early else None,
        PACKED=packed,
        PARTS=max(1, tuning.COMBINED_ELEMENTS // (packed * call.width)),
        **_shared(call, split=True),
    )
    if call.sparse:
        # A row of more query tokens is not split.
        combine_kernel[(rows, call.q.shape[1], min(call.step.max_query, call.small // call.group))](
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
            PARTS=tuning.COMBINED_ALONE // call.width,
            WIDTH=call.width,
            num_warps=2,
            **overlap(out.device),
        )


def _plan_chunks(call: _Call) -> torch.Tensor:
    """Units of the chunk kernels, see chunk_plan_kernel; int32 [CHUNK_FIELDS, n]."""
    step, tile, rows = call.step, call.tile(split=False), call.step.rows.shape[0]
    tokens = call.q.shape[0]
    # Each row with so many tokens that it belongs here may end with a tile that is not full.
    count = triton.cdiv(tokens * call.group, tile.queries) + min(rows, tokens // (call.small // call.group + 1))
    units = torch.empty((CHUNK_FIELDS, count), dtype=torch.int32, device=call.q.device)
    block = 16
    chunk_plan_kernel[(triton.cdiv(count, block),)](
        step.rows,
        step.q_start,
        step.length,
        units,
        rows,
        count,
        call.group,
        call.small,
        tile=tile.queries,
        keys=tile.keys,
        # One size for nearly all: warm-up has few rows, and others would compile while requests wait.
        ROWS=_class(rows, tuning.PLAN_ROWS[-1:]),
        BLOCK=block,
        **overlap(call.q.device),
    )
    return units


def _chunks(call: _Call, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Rows with many query tokens: one program per tile of packed queries and KV head; on Hopper one per processor, each going
    through many tiles."""
    if call.on_hopper:
        units = _once(call, "hopper", lambda: _plan_chunks(call))
        hopper.attend(call.q, call.view, units, (out, lse), _processors(call.q.device))
        return
    units = _once(call, "chunks", lambda: _plan_chunks(call))
    chunk_kernel[(units.shape[1] * call.view.kv.shape[2],)](
        units_ptr=units,
        out_ptr=out,
        lse_ptr=lse,
        units=units.shape[1],
        QUERIES=call.tile(split=False).queries,
        **_shared(call, split=False),
    )


def attention(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    view: KvView,
    step: StepInputs,
    lse_needed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See AttentionOps. Query tokens of no row are left as they come unless lse_needed; head sizes up to 256."""
    group = q.shape[1] // view.kv.shape[2]
    packed = step.max_query * group
    few = packed <= tuning.LARGER_SPLIT_QUERIES[-1]
    # Not the exact number: each would be a kernel of its own.
    small = group if step.max_query == 1 else max(tuning.SPLIT_QUERIES, group)
    if few and packed > small:
        small = _class(packed, tuning.LARGER_SPLIT_QUERIES)
    call = _Call(q, view, step, small, lse_needed)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if lse_needed:  # the kernels do not write tokens of no row
        out.zero_()
        lse.fill_(float("-inf"))
    if q.shape[0]:
        _split(call, out, lse)
        if not few:
            _chunks(call, out, lse)
    return out, lse
