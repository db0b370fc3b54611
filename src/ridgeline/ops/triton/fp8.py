"""8-bit linears: products that stream e4m3 weights.

One token is a matrix-vector product in registers (fp8_vector; here for shapes that it does not take); up to LARGEST_SMALL
tokens weights stream through a ring on Hopper (ring), elsewhere a tensor-core product splits the inputs so that every
processor streams weights; beyond it cuBLAS (cublas, `torch._scaled_mm`), which is bound by arithmetic there.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ridgeline.ops.table import Activation, Fp8Matrix, Fp8Ops, Normed, Scaled
from ridgeline.ops.triton import cublas, fp8_vector
from ridgeline.ops.triton.launch import await_inputs, gluon, overlap
from ridgeline.ops.triton.quantize import activate, quantize, rms_norm
from ridgeline.ops.triton.ring_shapes import ring8_for
from ridgeline.ops.triton.shapes import ResidentTile


@dataclass(frozen=True, slots=True)
class Vector:
    """Launch of the matrix-vector kernel. rows: output channels of a program; inputs: of one turn of its loop."""

    rows: int
    inputs: int
    warps: int


@dataclass(frozen=True, slots=True)
class Small:
    """Launch of the small product. outputs, inputs: of a tile; programs: how many are wanted, by splitting the inputs. asked:
    bytes of each row of weights asked for before x is there, if a program takes so many. exact: see PROMOTE in the kernel."""

    outputs: int
    inputs: int
    programs: int
    warps: int
    stages: int
    asked: int = 512
    exact: bool = False


WIDE = 16384
"""Outputs above which a matrix fills the chip with large tiles; smaller ones want many programs."""
# Measured with benchmarks/products_fp8.py --sweep.
VECTOR = Vector(1, 2048, 4)
"""Of one token that fp8_vector does not take."""
# (most outputs, fewest inputs) -> launch of fp8_vector; the first that fits serves. Measured in whole steps of an 8B.
RESIDENT = (
    (1 << 62, 4097, ResidentTile(2, 8, 264, 4)),
    (4096, 0, ResidentTile(8, 8, 132, 5)),
    (WIDE, 0, ResidentTile(4, 4, 264, 4)),
    (1 << 62, 0, ResidentTile(4, 4, 528, 4)),
)
_MANY = Small(64, 128, 132, 4, 6)
# Tokens of a tile -> launches for up to WIDE outputs and for more; None: cuBLAS is faster.
SMALL: dict[int, tuple[Small, Small | None]] = {
    16: (_MANY, Small(128, 256, 264, 8, 3)),
    32: (_MANY, Small(128, 128, 132, 8, 4)),
    64: (_MANY, _MANY),
    128: (_MANY, None),
}
LARGEST_SMALL = 128
"""Tokens up to which the small product serves; also the largest tile of tokens."""
PROMOTED = 128
"""Inputs after which a tensor core's sum is added to a float32 one (DeepSeek-V3 report, section 3.3.2)."""
SMALLEST_OUTPUTS = 64
LARGEST_SPLIT = 16


# --- one token --------------------------------------------------------------------------------------------------------


@triton.jit
def _vector_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    outputs,
    inputs: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS outputs of one token. ADD: out holds the stream, which the outputs join. The first weights are asked for before
    the kernel that makes x has ended."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < outputs
    w_row = w_ptr + tl.where(real, row, 0).to(tl.int64)[:, None] * inputs
    at = tl.arange(0, BLOCK)
    inside = at < inputs
    w = tl.load(w_row + at[None, :], mask=inside[None, :], other=0.0, eviction_policy="evict_first")
    await_inputs(PDL)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    acc = w.to(tl.float32) * x.to(tl.float32)[None, :]
    for block in tl.static_range(1, BLOCKS):
        here = block * BLOCK + at
        inside = here < inputs
        w = tl.load(w_row + here[None, :], mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + here, mask=inside, other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    out = tl.sum(acc, 1) * (tl.load(x_scale_ptr) * tl.load(w_scale_ptr + row, mask=real, other=0.0))
    if BIAS:
        out += tl.load(bias_ptr + row, mask=real, other=0.0).to(tl.float32)
    if ADD:
        out += tl.load(out_ptr + row, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, out.to(out_ptr.dtype.element_ty), mask=real)


def vector(
    x: Scaled, matrix: Fp8Matrix, bias: torch.Tensor | None, out: torch.Tensor, launch: Vector, add: bool = False
) -> None:
    """One token's outputs into out [1, outputs], or added to what is there."""
    outputs, inputs = matrix.values.shape
    block = min(launch.inputs, triton.next_power_of_2(inputs))
    _vector_kernel[(triton.cdiv(outputs, launch.rows),)](
        x.values,
        x.scales,
        matrix.values,
        matrix.scales,
        matrix.scales if bias is None else bias,
        out,
        outputs,
        inputs,
        BIAS=bias is not None,
        ADD=add,
        ROWS=launch.rows,
        BLOCKS=triton.cdiv(inputs, block),
        BLOCK=block,
        num_warps=launch.warps,
        **overlap(out.device),
    )


def resident_for(outputs: int, inputs: int) -> ResidentTile:
    """The launch of fp8_vector."""
    return next(tile for most, least, tile in RESIDENT if outputs <= most and inputs >= least)


# --- several tokens ---------------------------------------------------------------------------------------------------


@triton.jit
def _finish(
    acc,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    row,
    token,
    outputs,
    tokens,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
):
    """Scale a tile of sums [outputs, tokens], add the bias and what out holds, round and store."""
    real = (row < outputs)[:, None] & (token < tokens)[None, :]
    w_scale = tl.load(w_scale_ptr + row, mask=row < outputs, other=0.0)
    x_scale = tl.load(x_scale_ptr + token, mask=token < tokens, other=0.0)
    acc, scale = tl.broadcast(acc.to(tl.float32), w_scale[:, None].to(tl.float32) * x_scale[None, :])
    at = token.to(tl.int64)[None, :] * outputs + row[:, None]
    held = tl.zeros_like(acc)
    if ADD:
        held = tl.load(out_ptr + at, mask=real, other=0.0).to(tl.float32)
    # What joins first is added by the instruction that scales. Left to the compiler, it would be in some kernels and not in others.
    if BIAS:
        bias = tl.load(bias_ptr + row, mask=row < outputs, other=0.0).to(tl.float32)
        acc = tl.math.fma(acc, scale, tl.broadcast(acc, bias[:, None])[1]) + held
    else:
        acc = tl.math.fma(acc, scale, held)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def _ask(w_ptr, first, outputs, inputs, begin, OUTPUTS: tl.constexpr, ASKED: tl.constexpr):
    """Have ASKED bytes of each of OUTPUTS rows of weights fetched into L2, from input `begin` on, half of them a thread."""
    part = tl.arange(0, 2 * OUTPUTS)
    row = tl.minimum(first + part % OUTPUTS, outputs - 1)
    address = (w_ptr + row.to(tl.int64) * inputs + begin + part // OUTPUTS * (ASKED // 2)).to(tl.int64)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address, tl.full((2 * OUTPUTS,), ASKED // 2, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["tokens", "turns", "shares"])
def _small_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    counter_ptr,
    tokens,
    outputs,
    inputs,
    turns,
    shares,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    SHARED: tl.constexpr,
    WHOLE: tl.constexpr,
    PROMOTE: tl.constexpr,
    PDL: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ASKED: tl.constexpr,
):
    """A tile [OUTPUTS, TOKENS] of W x^T, over `turns` blocks of the inputs. The weights are the left operand, whose side of
    the tensor-core instruction is the wide one. SHARED: `shares` programs per tile leave their sums in part_ptr, and the
    last to come adds them all, always in the same order. WHOLE: blocks of inputs are full. PROMOTE: inputs after which
    the tensor core's sum of 8-bit products, which keeps fewer bits than float32, is added to a float32 one; 0: products
    in float16, exact, with sums in float32. ASKED: bytes of each row asked for before x is there."""
    tile, token_tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    token = token_tile * TOKENS + tl.arange(0, TOKENS)
    at = tl.arange(0, INPUTS)
    w_row = w_ptr + tl.minimum(row, outputs - 1).to(tl.int64)[:, None] * inputs
    # For the tokens that a tile lacks others are read, each as often: one row that all programs read would be a crowd at one place.
    x_row = x_ptr + (token % tokens).to(tl.int64)[:, None] * inputs
    # Integers (w8a8) have integer sums, which are exact however they are split.
    SUM: tl.constexpr = tl.int32 if w_ptr.dtype.element_ty == tl.int8 else tl.float32
    acc = tl.zeros([OUTPUTS, TOKENS], dtype=SUM)
    if PDL and ASKED > 0:
        _ask(w_ptr, tile * OUTPUTS, outputs, inputs, split * turns * INPUTS, OUTPUTS, ASKED)
    await_inputs(PDL)
    for turn in range(split * turns, tl.minimum((split + 1) * turns, tl.cdiv(inputs, INPUTS))):
        here = turn * INPUTS + at
        if WHOLE:
            w = tl.load(w_row + here[None, :])
            x = tl.load(x_row + here[None, :])
        else:
            inside = (here < inputs)[None, :]
            w = tl.load(w_row + here[None, :], mask=inside, other=0.0)
            x = tl.load(x_row + here[None, :], mask=inside, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, max_num_imprecise_acc=PROMOTE, out_dtype=SUM)
    if not SHARED:
        _finish(acc, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, row, token, outputs, tokens, BIAS, ADD)
    else:
        place = token_tile * tl.num_programs(0) + tile
        part = part_ptr + place.to(tl.int64) * (shares * OUTPUTS * TOKENS)
        inner = tl.arange(0, OUTPUTS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        tl.store(part + split * (OUTPUTS * TOKENS) + inner, acc)
        # All of this program's stores come before the count, and the count before the last one's loads.
        tl.debug_barrier()
        before = tl.atomic_add(counter_ptr + place, 1, sem="acq_rel", scope="gpu")
        if before == shares - 1:
            acc = tl.load(part + inner)
            for other in range(1, shares):
                acc += tl.load(part + other * (OUTPUTS * TOKENS) + inner)
            _finish(acc, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, row, token, outputs, tokens, BIAS, ADD)
            tl.store(counter_ptr + place, 0)


def splits(outputs: int, inputs: int, tokens: int, tile: int, launch: Small) -> tuple[int, int]:
    """(programs that share a tile, blocks of inputs each of them takes)."""
    tiles = triton.cdiv(outputs, launch.outputs) * triton.cdiv(tokens, tile)
    turns = triton.cdiv(inputs, launch.inputs)
    wanted = min(max(1, launch.programs // tiles), turns, LARGEST_SPLIT)
    each = triton.cdiv(turns, wanted)
    return triton.cdiv(turns, each), each


def _asks(weights: torch.Tensor, dealt: int, run: int, launch: Small) -> bool:
    """Whether programs that take `run` inputs each, `dealt` together, may ask early: nothing behind a row, and sixteens alone."""
    return dealt == weights.shape[1] and launch.asked <= run and weights.data_ptr() % 16 == 0


def small(
    x: Scaled, matrix: Fp8Matrix, bias: torch.Tensor | None, out: torch.Tensor, launch: Small, add: bool = False
) -> None:
    """Outputs of all tokens into out [T, outputs], or added to what is there. Any T; made for few."""
    outputs, inputs = matrix.values.shape
    tokens = x.values.shape[0]
    tile = min(LARGEST_SMALL, max(16, triton.next_power_of_2(tokens)))
    split, turns = splits(outputs, inputs, tokens, tile, launch)
    grid = (triton.cdiv(outputs, launch.outputs), triton.cdiv(tokens, tile), split)
    if split > 1 and grid[0] * grid[1] > matrix.counters.numel():
        split, turns, grid = 1, triton.cdiv(inputs, launch.inputs), (grid[0], grid[1], 1)
    room = split * grid[0] * grid[1] * launch.outputs * tile if split > 1 else 0
    sums = torch.int32 if matrix.values.dtype == torch.int8 else torch.float32
    part = torch.empty(room, dtype=sums, device=out.device) if room else matrix.scales
    _small_kernel[grid](
        x.values,
        x.scales,
        matrix.values,
        matrix.scales,
        matrix.scales if bias is None else bias,
        out,
        part,
        matrix.counters,
        tokens,
        outputs,
        inputs,
        turns,
        split,
        BIAS=bias is not None,
        ADD=add,
        SHARED=split > 1,
        WHOLE=inputs % launch.inputs == 0,
        PROMOTE=0 if launch.exact else min(PROMOTED, launch.inputs),
        TOKENS=tile,
        OUTPUTS=launch.outputs,
        INPUTS=launch.inputs,
        ASKED=launch.asked if _asks(matrix.values, turns * split * launch.inputs, turns * launch.inputs, launch) else 0,
        num_warps=launch.warps,
        num_stages=launch.stages,
        **overlap(out.device),
    )


def pack(values: torch.Tensor, scales: torch.Tensor) -> Fp8Matrix:
    """The matrix as it is, and a counter for each of its output tiles."""
    tiles = triton.cdiv(values.shape[0], SMALLEST_OUTPUTS)
    return Fp8Matrix(values, scales, torch.zeros(tiles, dtype=torch.int32, device=values.device))


def _large(x: Scaled, matrix: Fp8Matrix, bias: torch.Tensor | None, stream: torch.Tensor | None) -> torch.Tensor:
    """cuBLAS, in bfloat16, onto the stream if there is one; inputs and outputs in sixteens. Sums in the tensor core's own
    precision."""
    shape = (x.values.shape[0], matrix.values.shape[0])
    out = torch.empty(shape, dtype=torch.bfloat16, device=matrix.values.device) if stream is None else stream
    if bias is None and cublas.product(x, matrix, out, stream is not None):
        return out
    apart = torch._scaled_mm(
        x.values,
        matrix.values.t(),
        scale_a=x.scales.unsqueeze(1),
        scale_b=matrix.scales.unsqueeze(0),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return apart if stream is None else stream.add_(apart)


def _small_for(tokens: int, outputs: int) -> Small | None:
    """The launch for so many tokens; None: more than the small product is good for."""
    if tokens > LARGEST_SMALL:
        return None
    return SMALL[max(16, triton.next_power_of_2(tokens))][outputs > WIDE]


def _scaled(x: Activation) -> Scaled:
    """x in 8 bits, its norm done first where it is still to be."""
    if isinstance(x, Scaled):
        return x
    return rms_norm(x.x, x.weight, x.eps, x.offset) if isinstance(x, Normed) else quantize(x)


def ringed(
    x: Scaled, matrix: Fp8Matrix, bias: torch.Tensor | None, into: torch.Tensor | torch.dtype, kind: str | None = None
) -> torch.Tensor | None:
    """The product through a ring, its activation included, into a stream or as the type that is asked for; None: not so."""
    (tokens, inputs), outputs = x.values.shape, matrix.values.shape[0]
    dtype = into if isinstance(into, torch.dtype) else into.dtype
    tile = ring8_for(tokens, outputs, inputs, kind is not None)
    addressed = not inputs % 16 and not (x.values.data_ptr() | matrix.values.data_ptr()) % 16
    if tile is None or not addressed or dtype not in (torch.bfloat16, torch.float16):
        return None
    module = gluon(matrix.values.device, "ring")
    if module is None:
        return None
    product: torch.Tensor = module.ring_product(x, matrix, bias, tile, into, kind)
    return product


def _product(
    x: Activation,
    matrix: Fp8Matrix,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    stream: torch.Tensor | None,
) -> torch.Tensor:
    """x W^T + bias in dtype; with a stream, contiguous and of that dtype, added into its memory."""
    outputs, inputs = matrix.values.shape
    if not isinstance(x, Scaled) and fp8_vector.takes(x, matrix):
        return fp8_vector.product(x, matrix, bias, resident_for(outputs, inputs), stream)
    x = _scaled(x)
    if (out := ringed(x, matrix, bias, dtype if stream is None else stream)) is not None:
        return out
    tokens = x.values.shape[0]
    launch = _small_for(tokens, outputs)
    if launch is None and dtype == torch.bfloat16 and not (outputs | inputs) % 16:
        return _large(x, matrix, bias, stream)
    add = stream is not None
    out = torch.empty((tokens, outputs), dtype=dtype, device=matrix.values.device) if stream is None else stream
    if tokens == 1:
        vector(x, matrix, bias, out, VECTOR, add)
    elif tokens:
        small(x, matrix, bias, out, launch or _MANY, add)
    return out


def linear(x: Activation, matrix: Fp8Matrix, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """See reference.fp8_linear."""
    return _product(x, matrix, bias, dtype, None)


def linear_add(x: Activation, matrix: Fp8Matrix, bias: torch.Tensor | None, stream: torch.Tensor) -> torch.Tensor:
    """See reference.fp8_linear_add; the result takes the stream's memory."""
    return _product(x, matrix, bias, stream.dtype, stream.contiguous())


def linear_activate(
    x: Activation, matrix: Fp8Matrix, bias: torch.Tensor | None, dtype: torch.dtype, kind: str
) -> Activation:
    """See Fp8Ops; plain where the activation is part of the product: the next one quantizes it."""
    if not isinstance(x, Scaled) and fp8_vector.takes(x, matrix):
        return fp8_vector.product(x, matrix, bias, resident_for(*matrix.values.shape), kind=kind)
    x = _scaled(x)
    out = ringed(x, matrix, bias, dtype, kind)
    return activate(linear(x, matrix, bias, dtype), kind) if out is None else out


FP8_TRITON = Fp8Ops(pack, linear, linear_add, linear_activate)
