"""How the kernels of paged attention are launched, and what a step's layers share. The kernels: walk, plan, chunk, hopper; who is
launched: attention.

Which program does what is written by a plan kernel from lengths on the device, once per step and group, so grids depend on shapes
alone and everything may live in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
import triton

from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.triton import hopper, tuning
from ridgeline.ops.triton.chunk import UNIT_FIELDS as CHUNK_FIELDS
from ridgeline.ops.triton.chunk import chunk_kernel, chunk_plan_kernel
from ridgeline.ops.triton.launch import overlap
from ridgeline.ops.triton.plan import UNIT_FIELDS, plan_kernel
from ridgeline.ops.triton.tuning import Tile, class_of
from ridgeline.ops.triton.walk import combine_kernel, split_kernel
from ridgeline.ops.triton.walk_arguments import padded_width, walk_arguments
from ridgeline.ops.triton.words import word_arguments, words_kernel


class AttentionShape(NamedTuple):
    """All that the choice of attention's kernels depends on: a step's rows, the heads, and how keys and values lie.

    max_query: most query tokens of a row. long: some row may hold more than step.SHORT slots. dtype: of queries; cache: of keys and
    values. window, softcap: see KvView. in_order: queries see slots in order; neither draft trees nor compacted slots. aligned: the
    copy engine can address queries and cache; asked where rows may be chunks.
    """

    rows: int
    max_query: int
    long: bool
    heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: torch.dtype
    cache: torch.dtype
    device: torch.device
    processors: int
    window: int | None = None
    softcap: float | None = None
    in_order: bool = True
    aligned: bool = False
    lse_needed: bool = False

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def width(self) -> int:
        """Head size, padded."""
        return padded_width(self.head_dim)

    @property
    def programs(self) -> int:
        """Of the split kernel, if no row is split."""
        return self.rows * self.kv_heads

    @property
    def few(self) -> bool:
        """Whether the split kernel attends for all rows."""
        return self.max_query * self.group <= tuning.LARGER_SPLIT_QUERIES[-1]

    @property
    def small(self) -> int:
        """Packed queries (tokens times heads of a group) up to which a row is the split kernel's. Not the exact number: each would
        be a kernel of its own."""
        small = self.group if self.max_query == 1 else max(tuning.SPLIT_QUERIES, self.group)
        packed = self.max_query * self.group
        return tuning.class_of(packed, tuning.LARGER_SPLIT_QUERIES) if self.few and packed > small else small


Results = tuple[torch.Tensor, torch.Tensor]
"""The output [T, Hq, D] and the log-sum-exp float32 [T, Hq]."""
AttentionLaunch = Callable[[Any, AttentionShape, torch.Tensor, KvView, StepInputs, Results], None]
"""(configuration, shape, q, view, step, results): write the results of the rows that are the kernel's."""


class Split(NamedTuple):
    """How the split kernel runs.

    queries: packed queries of a row that have results in parts. spare: parts that there may be beyond one of each row. smallest:
    slots below which a part is not cut further. ahead: slots that a program asks for before it waits for the kernel before it; 0:
    none. registers: see Tile. combined: a row has many parts, as many as run at a time, and a kernel of its own, ready when the
    last part is, puts them together in half the time; else the last program of a row does. words: a cache in 8 or 4 bits is read
    as words, see words.
    """

    tile: Tile
    queries: int
    spare: int
    smallest: int
    ahead: int
    registers: int | None
    combined: bool
    words: bool = False


class _Work(NamedTuple):
    """The split kernel's plan on the device, see plan_kernel. units: int32 [UNIT_FIELDS, n]. rows: int32 [2, B].
    arrivals: int32 [B, Hkv], zero between two layers."""

    units: torch.Tensor
    rows: torch.Tensor
    arrivals: torch.Tensor


def _key(config: Split | Tile, shape: AttentionShape) -> Hashable:
    """Of a plan in step.derived. A graph under capture must record its own plan, so it shares none from before."""
    capturing = shape.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return ("triton", config, shape, capturing)


def _plan(config: Split, shape: AttentionShape, view: KvView, step: StepInputs) -> _Work:
    """Write the units of the split kernel: runs of slots of a row."""
    rows, device = shape.rows, shape.device
    count = rows + config.spare
    units = torch.empty((UNIT_FIELDS, count), dtype=torch.int32, device=device)
    per_row = torch.empty((2, rows), dtype=torch.int32, device=device)
    arrivals = torch.empty((rows, shape.kv_heads), dtype=torch.int32, device=device)
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
        config.spare,
        shape.group,
        shape.small,
        config.smallest,
        kv_heads=shape.kv_heads,
        window=0 if step.key_positions is not None else view.window or 0,
        tile=config.tile.keys,
        FINER=config.combined,
        ROWS=class_of(rows, tuning.PLAN_ROWS),
        BLOCK=block,
        **overlap(device),
    )
    return _Work(units, per_row, arrivals)


def split(
    config: Split, shape: AttentionShape, q: torch.Tensor, view: KvView, step: StepInputs, results: Results
) -> None:
    """Rows with few query tokens: parts of their keys in parallel, then the parts of a row together."""
    key, (out, lse) = _key(config, shape), results
    known: _Work | None = step.derived.get(key)
    work = known if known is not None else step.derived.setdefault(key, _plan(config, shape, view, step))
    count, queries, width = work.units.shape[1], config.queries, shape.width
    kv_heads, dim = shape.kv_heads, shape.head_dim
    packed = triton.next_power_of_2(queries)
    part = torch.empty((count, kv_heads, queries, dim), dtype=torch.float32, device=out.device)
    part_lse = torch.empty((count, kv_heads, queries), dtype=torch.float32, device=out.device)
    arguments = {"QUERIES": max(16, packed), **walk_arguments(config.tile, q, view, step)}
    if config.words:
        arguments |= word_arguments(view, packed)
    kernel = words_kernel if config.words else split_kernel
    kernel[(count * kv_heads,)](
        units_ptr=work.units,
        arrivals_ptr=work.arrivals,
        out_ptr=out,
        lse_ptr=lse,
        part_ptr=part,
        part_lse_ptr=part_lse,
        units=count,
        planned=int(known is not None and not view.chosen),
        part_queries=queries,
        AHEAD=config.ahead,
        FUSED=not config.combined,
        maxnreg=config.registers,
        PACKED=packed,
        PARTS=max(1, tuning.COMBINED_ELEMENTS // (packed * width)),
        **arguments,
    )
    if config.combined:
        # A row of more query tokens is not split.
        combine_kernel[(shape.rows, shape.heads, min(shape.max_query, queries // shape.group))](
            work.rows,
            step.q_start,
            part,
            part_lse,
            out,
            lse,
            shape.rows,
            part_queries=queries,
            kv_heads=kv_heads,
            group=shape.group,
            head_dim=dim,
            PARTS=tuning.COMBINED_ALONE // width,
            WIDTH=width,
            num_warps=2,
            **overlap(out.device),
        )


def _chunk_units(tile: Tile, shape: AttentionShape, tokens: int, step: StepInputs) -> torch.Tensor:
    """Units of the chunk kernels, see chunk_plan_kernel; int32 [CHUNK_FIELDS, n]. Once per step and group."""
    key = _key(tile, shape)
    known: torch.Tensor | None = step.derived.get(key)
    if known is not None:
        return known
    rows, group, small = shape.rows, shape.group, shape.small
    # Each row with so many tokens that it belongs here may end with a tile that is not full.
    count = triton.cdiv(tokens * group, tile.queries) + min(rows, tokens // (small // group + 1))
    units = torch.empty((CHUNK_FIELDS, count), dtype=torch.int32, device=shape.device)
    block = 16
    chunk_plan_kernel[(triton.cdiv(count, block),)](
        step.rows,
        step.q_start,
        step.length,
        units,
        rows,
        count,
        group,
        small,
        tile=tile.queries,
        keys=tile.keys,
        # One size for nearly all: warm-up has few rows, and others would compile while requests wait.
        ROWS=class_of(rows, tuning.PLAN_ROWS[-1:]),
        BLOCK=block,
        **overlap(shape.device),
    )
    step.derived[key] = units
    return units


def hopper_chunks(
    tile: Tile, shape: AttentionShape, q: torch.Tensor, view: KvView, step: StepInputs, results: Results
) -> None:
    """Rows with many query tokens: one program per processor, each going through many tiles of packed queries."""
    hopper.attend(q, view, _chunk_units(tile, shape, q.shape[0], step), results, shape.processors)


def chunks(
    tile: Tile, shape: AttentionShape, q: torch.Tensor, view: KvView, step: StepInputs, results: Results
) -> None:
    """Rows with many query tokens: one program per tile of packed queries and KV head."""
    units = _chunk_units(tile, shape, q.shape[0], step)
    chunk_kernel[(units.shape[1] * shape.kv_heads,)](
        units_ptr=units,
        out_ptr=results[0],
        lse_ptr=results[1],
        units=units.shape[1],
        QUERIES=tile.queries,
        **walk_arguments(tile, q, view, step),
    )
