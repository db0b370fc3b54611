"""Kernel that verifies drafts and appends accepted tokens, one program per row. See ops.verify."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.ops.rows import Drafted, Int, RowState
from ridgeline.ops.triton.launch import await_inputs, overlap
from ridgeline.ops.triton.rows import DONE, KNOWN, LENGTH, LIMIT, MIN_TOKENS, POSITION, PROMPT, STOP

BLOCK = 1024
"""Elements of a hidden state per program."""


@triton.jit(do_not_specialize=["columns", "packed_stride"])
def _verify_kernel(
    rows_ptr,
    drawn_ptr,
    first_ptr,
    n_draft_ptr,
    parent_ptr,
    tokens_ptr,
    ints_ptr,
    packed_ptr,
    path_ptr,
    width,
    ints_stride,
    packed_stride,
    columns,
    stops: tl.constexpr,
    TREE: tl.constexpr,
    PDL: tl.constexpr,
    NODES: tl.constexpr,
    STOPS: tl.constexpr,
):
    """Verify one row per program. Start at the root, take the token drawn at a node, and continue at the child that drafted it, if
    any. Row 0 is done, so programs that share it write the values it already has."""
    await_inputs(PDL)
    index = tl.program_id(0)
    row = tl.load(rows_ptr + index)
    row_ptr = ints_ptr + row * ints_stride
    known = tl.load(row_ptr + KNOWN)
    done = tl.load(row_ptr + DONE)
    prompt = tl.load(row_ptr + PROMPT)
    fewest = tl.load(row_ptr + MIN_TOKENS)
    limit = tl.load(row_ptr + LIMIT)
    stop_at = tl.arange(0, STOPS)
    stop_ids = tl.load(row_ptr + STOP + stop_at, mask=stop_at < stops, other=-1)
    node = tl.arange(0, NODES)
    count = tl.load(n_draft_ptr + index)
    drafted = (node > 0) & (node <= count)
    draft = tl.load(tokens_ptr + row * width + known + node - 1, mask=drafted, other=-1)
    parent = node - 1
    if TREE:
        parent = tl.load(parent_ptr + index * columns + node, mask=drafted, other=-1).to(tl.int32)
    drawn = tl.load(drawn_ptr + tl.load(first_ptr + index) + node, mask=node <= count, other=-1)
    packed = packed_ptr + index * packed_stride
    if TREE:
        tl.store(packed + 2 + columns + node, drawn, mask=node < columns)
    # Places after the path hold the tokens drawn there, as without drafts.
    tokens = drawn
    path = tl.zeros((NODES,), tl.int32)
    here = 0
    gained = 0
    flag = 0
    going = 1 - done
    for depth in range(NODES):
        token = tl.sum(tl.where(node == here, drawn, 0), 0)
        stopped = tl.sum((stop_ids == token).to(tl.int32), 0) > 0
        known_after = known + depth + 1
        stopped = stopped & (known_after - prompt > fewest)
        ended = tl.where(known_after >= limit, 2, 0) + tl.where(stopped, 1, 0)
        tokens = tl.where((node == depth) & (going > 0), token, tokens)
        path = tl.where((node == depth) & (going > 0), here, path)
        gained += going
        flag = tl.where(going > 0, ended, flag)
        child = tl.max(tl.where(drafted & (parent == here) & (draft == token), node, 0), 0)
        going = tl.where((ended == 0) & (child > 0), going, 0)
        here = child
    tl.store(tokens_ptr + row * width + known + node, tokens, mask=(node < gained))
    tl.store(packed, gained)
    tl.store(packed + 1, flag)
    tl.store(packed + 2 + node, tokens, mask=node < columns)
    if TREE:
        tl.store(packed + 2 + 2 * columns + node, path, mask=node < columns)
        tl.store(path_ptr + index * columns + node, path.to(tl.int64), mask=node < columns)
    tl.store(row_ptr + POSITION, tl.load(row_ptr + POSITION) + gained)
    tl.store(row_ptr + LENGTH, tl.load(row_ptr + LENGTH) + gained)
    tl.store(row_ptr + KNOWN, known + gained)
    tl.store(row_ptr + DONE, done + tl.where(flag > 0, 1, 0))


def verify(
    state: RowState, rows: torch.Tensor, drawn: torch.Tensor, drafted: Drafted
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See ops.verify.verify. Values after the accepted tokens are undefined here too."""
    count, columns, parent = len(rows), drafted.columns, drafted.parent
    packed = torch.empty((count, 2 + (1 if parent is None else 3) * columns), dtype=torch.int32, device=rows.device)
    path = None if parent is None else torch.empty((count, columns), dtype=torch.int64, device=rows.device)
    stops = state.ints.shape[1] - Int.STOP
    if count:
        _verify_kernel[(count,)](
            rows,
            drawn,
            drafted.first,
            drafted.count,
            drawn if parent is None else parent,
            state.tokens,
            state.ints,
            packed,
            drawn if path is None else path,
            state.tokens.stride(0),
            state.ints.stride(0),
            packed.stride(0),
            columns,
            stops=stops,
            TREE=parent is not None,
            NODES=triton.next_power_of_2(columns),
            STOPS=triton.next_power_of_2(stops),
            num_warps=1,
            **overlap(rows.device),
        )
    return packed, path


@triton.jit(do_not_specialize=["packed_stride", "columns"])
def _last_kernel(
    packed_ptr,
    path_ptr,
    first_ptr,
    hidden_ptr,
    out_ptr,
    packed_stride,
    columns,
    width,
    TREE: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy BLOCK elements of a row's last hidden state per program; the grid is [rows, blocks]. hidden [N, width], out [rows,
    width]."""
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    node = tl.maximum(tl.load(packed_ptr + row * packed_stride) - 1, 0).to(tl.int64)
    if TREE:
        node = tl.load(path_ptr + row * columns + node)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(hidden_ptr + (tl.load(first_ptr + row) + node) * width + at, mask=at < width)
    tl.store(out_ptr + row * width + at, value, mask=at < width)


def last(packed: torch.Tensor, path: torch.Tensor | None, hidden: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """See ops.rows.last."""
    count, width = len(packed), hidden.shape[1]
    out = torch.empty((count, width), dtype=hidden.dtype, device=hidden.device)
    if count:
        _last_kernel[(count, triton.cdiv(width, BLOCK))](
            packed,
            packed if path is None else path,
            first,
            hidden,
            out,
            packed.stride(0),
            0 if path is None else path.shape[1],
            width,
            TREE=path is not None,
            BLOCK=BLOCK,
            num_warps=4,
            **overlap(hidden.device),
        )
    return out
