"""Matrix-vector products of one to four tokens: each program streams rows of the weight and accumulates in float32.

The limits are memory bandwidth and, for small matrices, the gap between two kernels. A program therefore loads its first weights,
which no kernel of a step writes, before it waits for the kernel that computes x (PDL, see launch). Registers bound the bytes that
an SM can have in flight, so a thread reduces its values immediately.

`vector_product` takes any k. `resident_product` takes k up to the hidden size of a decoder. A program keeps x in registers and
loops over rows. It fuses the neighbours of the product, which saves their launches and a second read of x: the preceding norm,
without rounding its result, and the activation of gate and up, whose rows it takes in pairs. Both can add the result to the
residual stream.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ridgeline.ops.table import FloatInput, Normed
from ridgeline.ops.triton.activation import KINDS, gated
from ridgeline.ops.triton.launch import await_inputs, gdc_wait, overlap
from ridgeline.ops.triton.shapes import ResidentTile, VectorTile

VECTOR = tl.constexpr(8)
"""Elements of a vectorized load: 16 bytes of 16-bit weights."""


@triton.jit
def _part(w, x, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Products of w [ROWS, BLOCK] and x [BLOCK], summed over the elements of a vectorized load: [ROWS, BLOCK / VECTOR]."""
    return tl.sum(tl.reshape(w * x[None, :], (ROWS, BLOCK // VECTOR, VECTOR)), 2)


@triton.jit
def _weights(w_row, at, k, EVEN_K: tl.constexpr):
    """Load [ROWS, BLOCK] of the weight, marked as first to be evicted because it is read once."""
    if EVEN_K:
        return tl.load(w_row + at[None, :], eviction_policy="evict_first")
    else:
        return tl.load(w_row + at[None, :], mask=(at < k)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _read(ptr, at, k, EVEN_K: tl.constexpr):
    """Load [BLOCK] of x or of the gain, in float32."""
    if EVEN_K:
        return tl.load(ptr + at).to(tl.float32)
    else:
        return tl.load(ptr + at, mask=at < k, other=0.0).to(tl.float32)


@triton.jit
def _store(out_ptr, bias_ptr, value, row, n, BIAS: tl.constexpr, ADD: tl.constexpr):
    """Store the outputs `row` of one token from its products [ROWS]."""
    if BIAS:
        value += tl.load(bias_ptr + row, mask=row < n, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(out_ptr + row, mask=row < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, value.to(out_ptr.dtype.element_ty), mask=row < n)


# --- any k ------------------------------------------------------------------------------------------------------------


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
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [TOKENS, n] = x [TOKENS, k] w [n, k]^T + bias, with ROWS rows of w per program. ADD: the result is added to out, which
    holds the residual stream."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    w_row = w_ptr + tl.minimum(row, n - 1).to(tl.int64)[:, None] * k
    w = _weights(w_row, at, k, EVEN_K)
    await_inputs(PDL)
    total0 = tl.zeros((ROWS, BLOCK // VECTOR), tl.float32)
    total1 = total0
    total2 = total0
    total3 = total0
    for start in range(0, k, BLOCK):
        here = start + at
        if start > 0:
            w = _weights(w_row, here, k, EVEN_K)
        w_f32 = w.to(tl.float32)
        total0 += _part(w_f32, _read(x_ptr, here, k, EVEN_K), ROWS, BLOCK)
        if TOKENS > 1:
            total1 += _part(w_f32, _read(x_ptr + x_stride, here, k, EVEN_K), ROWS, BLOCK)
        if TOKENS > 2:
            total2 += _part(w_f32, _read(x_ptr + 2 * x_stride, here, k, EVEN_K), ROWS, BLOCK)
        if TOKENS > 3:
            total3 += _part(w_f32, _read(x_ptr + 3 * x_stride, here, k, EVEN_K), ROWS, BLOCK)
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
    """x [T, k] with T <= 4 and contiguous rows, weight [n, k] contiguous -> x weight^T + bias [T, n] in x's dtype. stream:
    contiguous [T, n]; the result is added in place."""
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
        EVEN_K=k % tile.block == 0,
        ROWS=tile.rows,
        BLOCK=tile.block,
        num_warps=tile.warps,
        **overlap(x.device),
    )
    return out


# --- k that fits into registers ---------------------------------------------------------------------------------------


@triton.jit
def rows_of(group, n, KIND: tl.constexpr, ROWS: tl.constexpr):
    """Indices of a group of ROWS rows of w [n, k]. With an activation, gate and up rows of the same feature alternate."""
    row = group * ROWS + tl.arange(0, ROWS)
    if KIND != 0:
        # A feature past the last one maps to rows at or past the end of its half. It is not stored.
        row = row // 2 + row % 2 * (n // 2)
    return row


@triton.jit
def _group(w_ptr, group, at, n, k, KIND: tl.constexpr, EVEN_K: tl.constexpr, ROWS: tl.constexpr):
    """Load a group of rows [ROWS, BLOCK] of the weight."""
    row = w_ptr + tl.minimum(rows_of(group, n, KIND, ROWS), n - 1).to(tl.int64)[:, None] * k + at[None, :]
    if EVEN_K:
        return tl.load(row, eviction_policy="evict_first")
    else:
        return tl.load(row, mask=(at < k)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _token(x_ptr, gain, at, k, eps, NORM: tl.constexpr, EVEN_K: tl.constexpr):
    """Load one token's x [BLOCK] in float32 and apply the norm."""
    x = _read(x_ptr, at, k, EVEN_K)
    if NORM:
        x *= tl.rsqrt(tl.sum(x * x, 0) / k + eps) * gain
    return x


@triton.jit
def stream_of(out_ptr, group, n, ADD: tl.constexpr, ROWS: tl.constexpr):
    """Load the residual stream [ROWS] at a group's outputs, in its dtype; zeros without ADD. The early load hides its latency.

    Triton's pipeliner moves loads of four or more bytes some iterations ahead, which would place them before the wait for the
    kernel that writes the stream. These loads must stay scalar: the kernel is not specialized on divisibility of n, so that any
    element may be masked.
    """
    residual = tl.zeros((ROWS,), out_ptr.dtype.element_ty)
    if ADD:
        row = group * ROWS + tl.arange(0, ROWS)
        residual = tl.load(out_ptr + row, mask=row < n, other=0.0)
    return residual


@triton.jit
def put(out_ptr, bias_ptr, value, group, n, BIAS: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr):
    """Store one token's outputs from its products [ROWS] with a group of rows, after bias and activation."""
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
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [TOKENS, n] = x [TOKENS, k] w [n, k]^T + bias for one or two tokens, with all of k in a block.

    The grid is persistent: a program keeps x and loops over groups of ROWS rows of w with a pipeline of STAGES stages. Its first
    loads are in flight before the wait for x. ADD: as in vector_kernel. NORM: x is normalised with gain [k] (+ 1 with OFFSET)
    first. KIND: see activation.KINDS; w is then a merged gate and up, and out [TOKENS, n / 2] is act(gate) * up.
    """
    at = tl.arange(0, BLOCK)
    groups = (n + ROWS - 1) // ROWS
    first = tl.program_id(0)
    gain = tl.full((BLOCK,), 1.0, tl.float32)
    if NORM:
        gain = _read(gain_ptr, at, k, EVEN_K)
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
        w_f32 = _group(w_ptr, group, at, n, k, KIND, EVEN_K, ROWS).to(tl.float32)
        if group == first:
            if PDL:
                gdc_wait()
            x0 = _token(x_ptr, gain, at, k, eps, NORM, EVEN_K)
            residual0 = stream_of(out_ptr, group, n, ADD, ROWS)
            if TOKENS > 1:
                x1 = _token(x_ptr + x_stride, gain, at, k, eps, NORM, EVEN_K)
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
    x: FloatInput,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: ResidentTile,
    stream: torch.Tensor | None = None,
    kind: str | None = None,
) -> torch.Tensor:
    """vector_product for one or two tokens. If x is Normed, the kernel applies the norm. kind: activation of gate and up,
    weight [2 F, k] -> [T, F]."""
    norm = x if isinstance(x, Normed) else None
    source = x.x if isinstance(x, Normed) else x
    tokens, k = source.shape
    n = weight.shape[0]
    out = stream
    if out is None:
        out = torch.empty((tokens, n if kind is None else n // 2), dtype=source.dtype, device=source.device)
    block = max(VECTOR.value, triton.next_power_of_2(k))
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
        EVEN_K=k == block,
        STAGES=tile.stages,
        ROWS=tile.rows,
        BLOCK=block,
        num_warps=tile.warps,
        **overlap(source.device),
    )
    return out
