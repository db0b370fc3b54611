"""What is dictated to an engine of controlled acceptance (controlled.py), each in one kernel on a GPU."""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline.ops.rows import RowState
from ridgeline.ops.triton.launch import await_inputs, overlap
from ridgeline.ops.triton.rows import KNOWN

BLOCK = 32


@triton.jit(do_not_specialize=["count"])
def _said_kernel(
    rows_ptr,
    ints_ptr,
    depth_ptr,
    said_ptr,
    tokens_ptr,
    ints_stride,
    places,
    count,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_inputs(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + at, mask=at < count, other=0)
    place = tl.load(ints_ptr + row * ints_stride + KNOWN) + tl.load(depth_ptr + at, mask=at < count, other=0)
    tl.store(tokens_ptr + at, tl.load(said_ptr + row * places + place), mask=at < count)


@triton.jit(do_not_specialize=["count"])
def _draft_kernel(
    rows_ptr,
    ints_ptr,
    said_ptr,
    luck_ptr,
    share_ptr,
    tokens_ptr,
    ints_stride,
    width,
    places,
    count,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    await_inputs(PDL)
    row = tl.load(rows_ptr + tl.program_id(0))
    node = tl.arange(0, WIDE)
    place = tl.load(ints_ptr + row * ints_stride + KNOWN) + node
    said = tl.load(said_ptr + row * places + place, mask=node < count)
    # A token's low bit turned over is another token.
    wrong = tl.load(luck_ptr + row * places + place, mask=node < count) >= tl.load(share_ptr)
    tl.store(tokens_ptr + row * width + place, said ^ wrong.to(tl.int32), mask=node < count)


def said(state: RowState, rows: torch.Tensor, depth: torch.Tensor, tokens: torch.Tensor, script: Any) -> torch.Tensor:
    """`tokens` int32 [N], drawn `depth` places behind what rows int32 [N] know: what is dictated instead."""
    _said_kernel[(triton.cdiv(len(rows), BLOCK),)](
        rows,
        state.ints,
        depth,
        script.said,
        tokens,
        state.ints.stride(0),
        script.places,
        len(rows),
        BLOCK=BLOCK,
        num_warps=1,
        **overlap(rows.device),
    )
    return tokens


def draft(state: RowState, rows: torch.Tensor, count: int, script: Any, share: torch.Tensor) -> None:
    """`count` nodes behind what rows int32 [S] know, right where luck is below `share`, an int32."""
    _draft_kernel[(len(rows),)](
        rows,
        state.ints,
        script.said,
        script.luck,
        share,
        state.tokens,
        state.ints.stride(0),
        state.tokens.stride(0),
        script.places,
        count,
        WIDE=triton.next_power_of_2(count),
        num_warps=1,
        **overlap(rows.device),
    )
