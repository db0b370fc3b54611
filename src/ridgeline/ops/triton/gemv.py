"""Matrix-vector products for one to four tokens: every program streams rows of the weight, in float32.

What limits them is reading the weight, and for small matrices the ramp between two kernels. Therefore a program starts
loading its weights, which no kernel of a step writes, before it waits for the kernel that makes x (programmatic
dependent launch, CUDA C++ programming guide, section "Programmatic Dependent Launch and Synchronization"). How much a
processor has asked for is bound by the registers of its programs, so a thread sums what it holds at once.

`vector_product` takes any number of inputs. `resident_product` takes a decoder's width: a program keeps x, walks over rows
and does on the way what stands around the product in a decoder, where it costs no launch and no second reading of x: the
norm before it, whose values are never rounded, and the activation of gate and up, whose rows it takes together. Both add
their sums to the stream.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.ops.table import Normed, Plain
from ridgeline.ops.triton.activation import KINDS, gated
from ridgeline.ops.triton.launch import await_inputs, overlap
from ridgeline.ops.triton.shapes import ResidentTile, VectorTile

WIDE = tl.constexpr(8)
"""Neighbours that a thread loads at once, 16 bytes of them."""


@triton.jit
def _part(w, x, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Products of w [ROWS, BLOCK] and x [BLOCK], summed over the neighbours of a thread: [ROWS, BLOCK / WIDE]."""
    return tl.sum(tl.reshape(w * x[None, :], (ROWS, BLOCK // WIDE, WIDE)), 2)


@triton.jit
def _weights(w_row, at, k, EVEN: tl.constexpr):
    """[ROWS, BLOCK] of the weight, read once and first to leave the caches."""
    if EVEN:
        return tl.load(w_row + at[None, :], eviction_policy="evict_first")
    else:
        return tl.load(w_row + at[None, :], mask=(at < k)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _read(ptr, at, k, EVEN: tl.constexpr):
    """[BLOCK] of x or of the gain, in float32."""
    if EVEN:
        return tl.load(ptr + at).to(tl.float32)
    else:
        return tl.load(ptr + at, mask=at < k, other=0.0).to(tl.float32)


@triton.jit
def _store(out_ptr, bias_ptr, value, row, n, BIAS: tl.constexpr, ADD: tl.constexpr):
    """One token's outputs `row` from its products [ROWS]."""
    if BIAS:
        value += tl.load(bias_ptr + row, mask=row < n, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(out_ptr + row, mask=row < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, value.to(out_ptr.dtype.element_ty), mask=row < n)


# --- any number of inputs ---------------------------------------------------------------------------------------------


@triton.jit
def vector_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    n,
    k,
    TOKENS: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [TOKENS, n] = x [TOKENS, k] w [n, k]^T + bias, ROWS rows of w per program. ADD: out holds the stream, which the
    product joins."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    w_row = w_ptr + tl.minimum(row, n - 1).to(tl.int64)[:, None] * k
    w = _weights(w_row, at, k, EVEN)
    await_inputs(PDL)
    total0 = tl.zeros((ROWS, BLOCK // WIDE), tl.float32)
    total1 = total0
    total2 = total0
    total3 = total0
    for start in range(0, k, BLOCK):
        here = start + at
        if start > 0:
            w = _weights(w_row, here, k, EVEN)
        w_f32 = w.to(tl.float32)
        total0 += _part(w_f32, _read(x_ptr, here, k, EVEN), ROWS, BLOCK)
        if TOKENS > 1:
            total1 += _part(w_f32, _read(x_ptr + x_stride, here, k, EVEN), ROWS, BLOCK)
        if TOKENS > 2:
            total2 += _part(w_f32, _read(x_ptr + 2 * x_stride, here, k, EVEN), ROWS, BLOCK)
        if TOKENS > 3:
            total3 += _part(w_f32, _read(x_ptr + 3 * x_stride, here, k, EVEN), ROWS, BLOCK)
    _store(out_ptr, bias_ptr, tl.sum(total0, 1), row, n, BIAS, ADD)
    if TOKENS > 1:
        _store(out_ptr + n, bias_ptr, tl.sum(total1, 1), row, n, BIAS, ADD)
    if TOKENS > 2:
        _store(out_ptr + 2 * n, bias_ptr, tl.sum(total2, 1), row, n, BIAS, ADD)
    if TOKENS > 3:
        _store(out_ptr + 3 * n, bias_ptr, tl.sum(total3, 1), row, n, BIAS, ADD)


def vector_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: VectorTile,
    stream: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, k] with T <= 4 and contiguous rows, weight [n, k] contiguous -> x weight^T + bias [T, n] in x's dtype.
    stream: contiguous [T, n]; the result is added into its memory."""
    tokens, k = x.shape
    n = weight.shape[0]
    out = torch.empty((tokens, n), dtype=x.dtype, device=x.device) if stream is None else stream
    vector_kernel[(triton.cdiv(n, tile.rows),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        x.stride(0),
        n,
        k,
        TOKENS=tokens,
        BIAS=bias is not None,
        ADD=stream is not None,
        EVEN=k % tile.block == 0,
        ROWS=tile.rows,
        BLOCK=tile.block,
        num_warps=tile.warps,
        **overlap(x.device),
    )
    return out


# --- inputs that fit into registers -----------------------------------------------------------------------------------


@triton.jit
def rows_of(group, n, KIND: tl.constexpr, ROWS: tl.constexpr):
    """A group of ROWS rows of w [n, k]; for an activation gate and up of the same features in turn."""
    row = group * ROWS + tl.arange(0, ROWS)
    if KIND != 0:
        # A feature behind the last one takes rows at or behind the end of its half; it is not stored.
        row = row // 2 + row % 2 * (n // 2)
    return row


@triton.jit
def _group(w_ptr, group, at, n, k, KIND: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr):
    """A group of rows [ROWS, BLOCK] of the weight."""
    row = w_ptr + tl.minimum(rows_of(group, n, KIND, ROWS), n - 1).to(tl.int64)[:, None] * k + at[None, :]
    if EVEN:
        return tl.load(row, eviction_policy="evict_first")
    else:
        return tl.load(row, mask=(at < k)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _token(x_ptr, gain, at, k, eps, NORM: tl.constexpr, EVEN: tl.constexpr):
    """One token's x [BLOCK], normed, in float32."""
    x = _read(x_ptr, at, k, EVEN)
    if NORM:
        x *= tl.rsqrt(tl.sum(x * x, 0) / k + eps) * gain
    return x


@triton.jit
def stream_of(out_ptr, group, n, ADD: tl.constexpr, ROWS: tl.constexpr):
    """What the stream holds where a group's outputs go, [ROWS] in its dtype, so that nothing waits for it until it is added;
    zeros unless they join it.

    A pipelined loop fetches loads of four bytes and more some turns ahead, and so before the wait for the kernel that writes the
    stream. These must stay single numbers: the kernel is not told of what n is a multiple, so any of them could be masked.
    """
    residual = tl.zeros((ROWS,), out_ptr.dtype.element_ty)
    if ADD:
        row = group * ROWS + tl.arange(0, ROWS)
        residual = tl.load(out_ptr + row, mask=row < n, other=0.0)
    return residual


@triton.jit
def put(out_ptr, bias_ptr, value, group, n, BIAS: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr):
    """One token's outputs from its products [ROWS] with a group of rows, and what they join."""
    row = rows_of(group, n, KIND, ROWS)
    if KIND == 0:
        _store(out_ptr, bias_ptr, value, row, n, BIAS, False)
    else:
        if BIAS:
            value += tl.load(bias_ptr + row, mask=row < n, other=0.0).to(tl.float32)
        feature = group * (ROWS // 2) + tl.arange(0, ROWS // 2)
        gate, up = tl.split(tl.reshape(value, (ROWS // 2, 2)))
        tl.store(out_ptr + feature, gated(gate, up, KIND).to(out_ptr.dtype.element_ty), mask=feature < n // 2)


@triton.jit(do_not_specialize_on_alignment=["n"])
def resident_kernel(
    x_ptr,
    gain_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    n,
    k,
    eps,
    TOKENS: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    KIND: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [TOKENS, n] = x [TOKENS, k] w [n, k]^T + bias for one or two tokens, with all k in a block.

    A program keeps x and walks over groups of ROWS rows of w, which a pipeline of STAGES brings ahead: its first loads are
    under way before the wait for x. ADD: as in vector_kernel. NORM: x is normed with gain [k] (+ 1 with OFFSET) first. KIND:
    see activation.KINDS; w is a merged gate and up then, and out [TOKENS, n / 2] takes act(gate) * up.
    """
    at = tl.arange(0, BLOCK)
    groups = (n + ROWS - 1) // ROWS
    first = tl.program_id(0)
    gain = tl.full((BLOCK,), 1.0, tl.float32)
    if NORM:
        gain = _read(gain_ptr, at, k, EVEN)
        if OFFSET:
            gain += 1.0
    if PDL:
        gdc_launch_dependents()
    x0 = tl.zeros((BLOCK,), tl.float32)
    x1 = x0
    residual0 = tl.zeros((ROWS,), out_ptr.dtype.element_ty)
    residual1 = residual0
    size = n if KIND == 0 else n // 2
    step = tl.num_programs(0)
    for group in tl.range(first, groups, step, num_stages=STAGES):
        w_f32 = _group(w_ptr, group, at, n, k, KIND, EVEN, ROWS).to(tl.float32)
        if group == first:
            if PDL:
                gdc_wait()
            x0 = _token(x_ptr, gain, at, k, eps, NORM, EVEN)
            residual0 = stream_of(out_ptr, group, n, ADD, ROWS)
            if TOKENS > 1:
                x1 = _token(x_ptr + x_stride, gain, at, k, eps, NORM, EVEN)
                residual1 = stream_of(out_ptr + size, group, n, ADD, ROWS)
        next0 = stream_of(out_ptr, group + step, n, ADD, ROWS)
        value = residual0.to(tl.float32) + tl.sum(_part(w_f32, x0, ROWS, BLOCK), 1)
        put(out_ptr, bias_ptr, value, group, n, BIAS, KIND, ROWS)
        residual0 = next0
        if TOKENS > 1:
            next1 = stream_of(out_ptr + size, group + step, n, ADD, ROWS)
            value = residual1.to(tl.float32) + tl.sum(_part(w_f32, x1, ROWS, BLOCK), 1)
            put(out_ptr + size, bias_ptr, value, group, n, BIAS, KIND, ROWS)
            residual1 = next1


def resident_product(
    x: Plain,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: ResidentTile,
    stream: torch.Tensor | None = None,
    kind: str | None = None,
) -> torch.Tensor:
    """As vector_product for one or two tokens; a norm of x that is still to be done is done on the way. kind: activate
    gate and up, weight [2 F, k] -> [T, F]."""
    norm = x if isinstance(x, Normed) else None
    source = x.x if isinstance(x, Normed) else x
    tokens, k = source.shape
    n = weight.shape[0]
    out = stream
    if out is None:
        out = torch.empty((tokens, n if kind is None else n // 2), dtype=source.dtype, device=source.device)
    block = max(WIDE.value, triton.next_power_of_2(k))
    resident_kernel[(min(tile.programs, triton.cdiv(n, tile.rows)),)](
        source,
        source if norm is None else norm.weight,
        weight,
        weight if bias is None else bias,
        out,
        source.stride(0),
        n,
        k,
        0.0 if norm is None else norm.eps,
        TOKENS=tokens,
        BIAS=bias is not None,
        ADD=stream is not None,
        NORM=norm is not None,
        OFFSET=norm is not None and norm.offset,
        KIND=KINDS[kind],
        EVEN=k == block,
        STAGES=tile.stages,
        ROWS=tile.rows,
        BLOCK=block,
        num_warps=tile.warps,
        **overlap(source.device),
    )
    return out
