"""Tensor-core products of few tokens: the long side of the matrix unit holds weight rows, the short side holds tokens.

A program computes a tile ROWS x BATCH of out^T = W x^T and streams weights through a deep load pipeline. A matrix with too few
tiles to keep all SMs reading is split along k (split-K). The last program of a tile to arrive adds the parts in a fixed order, so
results do not depend on timing. The epilogue fuses the activation of gate and up, whose rows a program takes in pairs, or the
residual sum. A program prefetches its first weights into L2 before it waits for the kernel that computes x (PDL, see launch).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ridgeline.ops.triton.activation import KINDS, gated
from ridgeline.ops.triton.launch import await_inputs, overlap
from ridgeline.ops.triton.shapes import MatrixTile

COUNTERS = 4096
"""Largest number of tiles with split-K. More tiles than this fill every GPU without a split."""


@cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """Split-K arrival counters, one per tile: zero before and after every product."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


@triton.jit
def _prefetch(w_ptr, row, k, begin, BYTES: tl.constexpr):
    """Prefetch BYTES of each row into L2, from element `begin` on."""
    address = (w_ptr + row.to(tl.int64) * k + begin).to(tl.int64)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], " + BYTES + "; mov.u32 $0, 0;",
        "=r,l",
        [address],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _sum_of_parts(parts, splits, SIZE: tl.constexpr):
    """Add the partial sums of a tile in a fixed order. SIZE: elements from one part to the next."""
    total = tl.load(parts, cache_modifier=".cg")
    for other in range(1, splits):
        total += tl.load(parts + other * SIZE, cache_modifier=".cg")
    return total


@triton.jit
def _biased(total, bias_ptr, row, n, BIAS: tl.constexpr):
    if BIAS:
        total += tl.load(bias_ptr + row, mask=row < n, other=0.0).to(tl.float32)[:, None]
    return total


@triton.jit(do_not_specialize=["m", "batches", "splits"])
def matrix_kernel(
    w_desc,
    x_desc,
    w_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    arrivals_ptr,
    m,
    n,
    k,
    batches,
    splits,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    KIND: tl.constexpr,
    SPLIT: tl.constexpr,
    BATCH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out [m, n] = x [m, k] w [features, k]^T + bias; each program computes one tile of ROWS features, or one split of it.

    ADD: the result is added to out, which holds the residual stream. KIND: see activation.KINDS; w [2 n, k] is then a merged gate
    and up, a tile covers the same ROWS features of both, and out is act(gate) * up. w_desc, x_desc: TMA descriptors, which fill
    with zeros past the edges. part: float32 [batches * tiles, splits, sides, ROWS, BATCH], sides 2 for gate and up; arrivals:
    int32, zero for every tile; both only with SPLIT. PREFETCH: bytes of a row to prefetch, as a string, or "".
    """
    split = tl.program_id(0) % splits
    tile = tl.program_id(0) // splits
    row_tile = tile // batches
    batch_tile = tile % batches
    blocks = (k + BLOCK - 1) // BLOCK
    begin = split * blocks // splits
    end = (split + 1) * blocks // splits
    row = row_tile * ROWS + tl.arange(0, ROWS)
    if PDL and PREFETCH != "":
        _prefetch(w_ptr, tl.minimum(row, n - 1), k, begin * BLOCK, PREFETCH)
        if KIND != 0:
            _prefetch(w_ptr, tl.minimum(row, n - 1) + n, k, begin * BLOCK, PREFETCH)
    await_inputs(PDL)
    token = batch_tile * BATCH + tl.arange(0, BATCH)
    total = tl.zeros((ROWS, BATCH), tl.float32)
    up = total
    for block in tl.range(begin, end, num_stages=STAGES):
        w = w_desc.load([row_tile * ROWS, block * BLOCK])
        x = x_desc.load([batch_tile * BATCH, block * BLOCK])
        total = tl.dot(w, x.T, total, input_precision=PRECISION)
        if KIND != 0:
            w = w_desc.load([n + row_tile * ROWS, block * BLOCK])
            up = tl.dot(w, x.T, up, input_precision=PRECISION)
    last = True
    if SPLIT:
        SIDE: tl.constexpr = ROWS * BATCH
        SIZE: tl.constexpr = SIDE if KIND == 0 else 2 * SIDE
        place = tl.arange(0, ROWS)[:, None] * BATCH + tl.arange(0, BATCH)[None, :]
        parts = part_ptr + tile.to(tl.int64) * splits * SIZE + place
        tl.store(parts + split * SIZE, total)
        if KIND != 0:
            tl.store(parts + split * SIZE + SIDE, up)
        # All threads must have stored their parts before one thread increments the counter.
        tl.debug_barrier()
        last = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == splits - 1
        if last:
            total = _sum_of_parts(parts, splits, SIZE)
            if KIND != 0:
                up = _sum_of_parts(parts + SIDE, splits, SIZE)
            tl.store(arrivals_ptr + tile, 0)
    if last:
        total = _biased(total, bias_ptr, row, n, BIAS)
        where = out_ptr + token.to(tl.int64)[None, :] * n + row[:, None]
        real = (row < n)[:, None] & (token < m)[None, :]
        if KIND != 0:
            total = gated(total, _biased(up, bias_ptr + n, row, n, BIAS), KIND)
        if ADD:
            total += tl.load(where, mask=real, other=0.0).to(tl.float32)
        tl.store(where, total.to(out_ptr.dtype.element_ty), mask=real)


def matrix_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: MatrixTile,
    stream: torch.Tensor | None = None,
    kind: str | None = None,
) -> torch.Tensor:
    """x [T, k] with contiguous rows, weight [n, k] contiguous -> x weight^T + bias [T, n] in x's dtype. Addresses and rows of both
    must be multiples of 16 bytes.

    stream: contiguous [T, n]; the result is added in place. kind: activation of gate and up, weight [2 F, k] -> [T, F].
    """
    tokens, k = x.shape
    # A tile of gate and up reads as many weight rows as any other tile, half of them from each.
    sides = 1 if kind is None else 2
    n, rows = weight.shape[0] // sides, tile.rows // sides
    batches, tiles = triton.cdiv(tokens, tile.batch), triton.cdiv(n, rows)
    splits = max(1, min(tile.splits, triton.cdiv(k, tile.block)))
    if batches * tiles > COUNTERS:
        splits = 1
    out = torch.empty((tokens, n), dtype=x.dtype, device=x.device) if stream is None else stream
    part, arrivals = out, out
    if splits > 1:
        shape = (batches * tiles, splits, tile.rows, tile.batch)
        part, arrivals = torch.empty(shape, dtype=torch.float32, device=x.device), _arrivals(x.device)
    launch = overlap(x.device)
    run = k // tile.block // splits * tile.block
    prefetch = (
        tile.prefetch_bytes
        if launch["PDL"] and k % tile.block == 0 and tile.prefetch_bytes <= run * x.element_size()
        else 0
    )
    matrix_kernel[(batches * tiles * splits,)](
        TensorDescriptor.from_tensor(weight, [rows, tile.block]),
        TensorDescriptor.from_tensor(x, [tile.batch, tile.block]),
        weight,
        weight if bias is None else bias,
        out,
        part,
        arrivals,
        tokens,
        n,
        k,
        batches,
        splits,
        BIAS=bias is not None,
        ADD=stream is not None,
        KIND=KINDS[kind],
        SPLIT=splits > 1,
        BATCH=tile.batch,
        ROWS=rows,
        BLOCK=tile.block,
        PREFETCH=str(prefetch) if prefetch else "",
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        STAGES=tile.stages,
        num_warps=tile.warps,
        **launch,
    )
    return out
