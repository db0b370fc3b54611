"""8-bit linears: norms and activations that quantize as they go, and products that stream e4m3 weights.

One token is a matrix-vector product in registers; up to LARGEST_SMALL tokens a tensor-core product that splits the inputs
so that every processor streams weights; beyond it cuBLAS (`torch._scaled_mm`), which is bound by arithmetic there.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.ops.table import Activation, Fp8Matrix, Fp8Ops, Scaled
from ridgeline.ops.triton.launch import await_inputs, overlap

FP8 = torch.float8_e4m3fn
LARGEST = tl.constexpr(448.0)
SMALLEST_AMAX = tl.constexpr(1e-12)
WIDEST_ROW = 16384
"""Elements of a row that one program keeps in registers; longer rows are read twice."""
WIDEST_VECTOR = 4096
"""Inputs up to which the matrix-vector kernel quantizes a plain x itself, each program again."""


@dataclass(frozen=True, slots=True)
class Vector:
    """Launch of the matrix-vector kernel. rows: output channels of a program; inputs: of one turn of its loop."""

    rows: int
    inputs: int
    warps: int


@dataclass(frozen=True, slots=True)
class Small:
    """Launch of the small product. outputs, inputs: of a tile; programs: how many are wanted, by splitting the inputs."""

    outputs: int
    inputs: int
    programs: int
    warps: int
    stages: int


WIDE = 16384
"""Outputs above which a matrix fills the chip with large tiles; smaller ones want many programs."""
# Measured with benchmarks/products_fp8.py --sweep. One token: inputs up to WIDEST_VECTOR by width, then longer ones.
VECTORS = (Vector(4, 4096, 4), Vector(2, 2048, 4))
LONG_VECTOR = Vector(1, 2048, 4)
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


# --- quantizing -------------------------------------------------------------------------------------------------------


@triton.jit
def _scale_of(amax):
    """(factor of the values, scale): 448 / amax and amax / 448, rounded as the reference rounds them."""
    amax = tl.maximum(amax, SMALLEST_AMAX)
    return tl.math.div_rn(LARGEST, amax), tl.math.div_rn(amax, LARGEST)


@triton.jit
def _norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    scale_ptr,
    total_ptr,
    x_stride,
    residual_stride,
    eps,
    size: tl.constexpr,
    ADD: tl.constexpr,
    OFFSET: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """RMS norm of one token (of its sum with the residual), rounded to x's dtype, then quantized."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if OFFSET:
        weight += 1.0
    await_inputs(PDL)
    x = tl.load(x_ptr + token * x_stride + at, mask=inside, other=0.0)
    if ADD:
        x = x + tl.load(residual_ptr + token * residual_stride + at, mask=inside, other=0.0)
        tl.store(total_ptr + token * size + at, x, mask=inside)
    wide = x.to(tl.float32)
    rms = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    normed = (wide * rms * weight).to(x_ptr.dtype.element_ty).to(tl.float32)
    factor, scale = _scale_of(tl.max(tl.abs(normed), 0))
    tl.store(out_ptr + token * size + at, (normed * factor).to(tl.float8e4nv), mask=inside)
    tl.store(scale_ptr + token, scale)


@triton.jit
def _source(x_ptr, at, inside, size, ACTIVATION: tl.constexpr):
    """What is quantized at `at`: x itself, or act(gate) * up rounded to x's dtype; float32."""
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION != 0:
        up = tl.load(x_ptr + size + at, mask=inside, other=0.0).to(tl.float32)
        if ACTIVATION == 2:
            # gelu_tanh(x) = x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3)), since (1 + tanh(y)) / 2 = sigmoid(2 y).
            act = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        else:
            act = x * tl.sigmoid(x)
        x = (act * up).to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _quantize_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    x_stride,
    size,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token of `size` values. ACTIVATION: 0 takes x as it is, 1 silu, 2 gelu_tanh of x = (gate, up)."""
    token = tl.program_id(0).to(tl.int64)
    x_ptr += token * x_stride
    out_ptr += token * size
    at = tl.arange(0, BLOCK)
    await_inputs(PDL)
    if BLOCKS == 1:
        x = _source(x_ptr, at, at < size, size, ACTIVATION)
        factor, scale = _scale_of(tl.max(tl.abs(x), 0))
        tl.store(out_ptr + at, (x * factor).to(tl.float8e4nv), mask=at < size)
    else:
        amax = 0.0
        for block in range(BLOCKS):
            here = block * BLOCK + at
            amax = tl.maximum(amax, tl.max(tl.abs(_source(x_ptr, here, here < size, size, ACTIVATION)), 0))
        factor, scale = _scale_of(amax)
        for block in range(BLOCKS):
            here = block * BLOCK + at
            x = _source(x_ptr, here, here < size, size, ACTIVATION)
            tl.store(out_ptr + here, (x * factor).to(tl.float8e4nv), mask=here < size)
    tl.store(scale_ptr + token, scale)


def _room(tokens: int, size: int, like: torch.Tensor) -> Scaled:
    values = torch.empty((tokens, size), dtype=FP8, device=like.device)
    return Scaled(values, torch.empty(tokens, dtype=torch.float32, device=like.device))


def _norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, offset: bool
) -> tuple[Scaled, torch.Tensor]:
    tokens, size = x.shape
    out = _room(tokens, size, x)
    total = x if residual is None else torch.empty((tokens, size), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    if tokens:
        _norm_kernel[(tokens,)](
            x,
            x if residual is None else residual,
            weight,
            out.values,
            out.scales,
            total,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            eps,
            size,
            ADD=residual is not None,
            OFFSET=offset,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
            **overlap(x.device),
        )
    return out, total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: bool) -> Scaled:
    """See reference.fp8_rms_norm."""
    return _norm(x, None, weight, eps, offset)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: bool
) -> tuple[Scaled, torch.Tensor]:
    """See reference.fp8_add_rms_norm."""
    return _norm(x, residual, weight, eps, offset)


def _quantized(x: torch.Tensor, size: int, activation: int) -> Scaled:
    tokens = x.shape[0]
    out = _room(tokens, size, x)
    block = min(WIDEST_ROW, triton.next_power_of_2(size))
    if tokens:
        _quantize_kernel[(tokens,)](
            x,
            out.values,
            out.scales,
            x.stride(0),
            size,
            ACTIVATION=activation,
            BLOCKS=triton.cdiv(size, block),
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
            **overlap(x.device),
        )
    return out


def activate(gate_up: torch.Tensor, kind: str) -> Scaled:
    """See reference.fp8_activate."""
    return _quantized(gate_up, gate_up.shape[1] // 2, 2 if kind == "gelu_tanh" else 1)


def quantize(x: torch.Tensor) -> Scaled:
    """See reference.quantize; x [T, D] with contiguous rows."""
    return _quantized(x, x.shape[1], 0)


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
    PLAIN: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS outputs of one token. PLAIN: x is not quantized yet; then one block covers all inputs. The first weights are
    asked for before the kernel that makes x has ended."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < outputs
    w_row = w_ptr + tl.where(real, row, 0).to(tl.int64)[:, None] * inputs
    at = tl.arange(0, BLOCK)
    inside = at < inputs
    w = tl.load(w_row + at[None, :], mask=inside[None, :], other=0.0, eviction_policy="evict_first")
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if PLAIN:
        factor, scale = _scale_of(tl.max(tl.abs(x.to(tl.float32)), 0))
        x = (x.to(tl.float32) * factor).to(tl.float8e4nv)
    else:
        scale = tl.load(x_scale_ptr)
    acc = w.to(tl.float32) * x.to(tl.float32)[None, :]
    for block in tl.static_range(1, BLOCKS):
        here = block * BLOCK + at
        inside = here < inputs
        w = tl.load(w_row + here[None, :], mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + here, mask=inside, other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    out = tl.sum(acc, 1) * (scale * tl.load(w_scale_ptr + row, mask=real, other=0.0))
    if BIAS:
        out += tl.load(bias_ptr + row, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, out.to(out_ptr.dtype.element_ty), mask=real)


def vector(x: Activation, matrix: Fp8Matrix, bias: torch.Tensor | None, out: torch.Tensor, launch: Vector) -> None:
    """One token's outputs into out [1, outputs]; a plain x must fit into launch.inputs."""
    outputs, inputs = matrix.values.shape
    values, scales = (x.values, x.scales) if isinstance(x, Scaled) else (x, matrix.scales)
    block = min(launch.inputs, triton.next_power_of_2(inputs))
    _vector_kernel[(triton.cdiv(outputs, launch.rows),)](
        values,
        scales,
        matrix.values,
        matrix.scales,
        matrix.scales if bias is None else bias,
        out,
        outputs,
        inputs,
        PLAIN=not isinstance(x, Scaled),
        BIAS=bias is not None,
        ROWS=launch.rows,
        BLOCKS=triton.cdiv(inputs, block),
        BLOCK=block,
        num_warps=launch.warps,
        **overlap(out.device),
    )


# --- several tokens ---------------------------------------------------------------------------------------------------


@triton.jit
def _finish(acc, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, row, token, outputs, tokens, BIAS: tl.constexpr):
    """Scale a tile of sums [outputs, tokens], add the bias, round and store."""
    real = (row < outputs)[:, None] & (token < tokens)[None, :]
    w_scale = tl.load(w_scale_ptr + row, mask=row < outputs, other=0.0)
    x_scale = tl.load(x_scale_ptr + token, mask=token < tokens, other=0.0)
    acc = acc * (w_scale[:, None] * x_scale[None, :])
    if BIAS:
        acc += tl.load(bias_ptr + row, mask=row < outputs, other=0.0).to(tl.float32)[:, None]
    at = token.to(tl.int64)[None, :] * outputs + row[:, None]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=real)


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
    SHARED: tl.constexpr,
    WHOLE: tl.constexpr,
    PROMOTE: tl.constexpr,
    PDL: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """A tile [OUTPUTS, TOKENS] of W x^T, over `turns` blocks of the inputs. The weights are the left operand, whose side of
    the tensor-core instruction is the wide one. SHARED: `shares` programs per tile leave their sums in part_ptr, and the
    last to come adds them all, always in the same order. WHOLE: blocks of inputs are full. PROMOTE: inputs after which
    the tensor core's sum of 8-bit products, which keeps fewer bits than float32, is added to a float32 one; 0: products
    in float16, exact, with sums in float32."""
    tile, token_tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    token = token_tile * TOKENS + tl.arange(0, TOKENS)
    at = tl.arange(0, INPUTS)
    w_row = w_ptr + tl.minimum(row, outputs - 1).to(tl.int64)[:, None] * inputs
    x_row = x_ptr + tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * inputs
    acc = tl.zeros([OUTPUTS, TOKENS], dtype=tl.float32)
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
        acc = tl.dot(w, tl.trans(x), acc, max_num_imprecise_acc=PROMOTE)
    if not SHARED:
        _finish(acc, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, row, token, outputs, tokens, BIAS)
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
            _finish(acc, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, row, token, outputs, tokens, BIAS)
            tl.store(counter_ptr + place, 0)


def splits(outputs: int, inputs: int, tokens: int, tile: int, launch: Small) -> tuple[int, int]:
    """(programs that share a tile, blocks of inputs each of them takes)."""
    tiles = triton.cdiv(outputs, launch.outputs) * triton.cdiv(tokens, tile)
    turns = triton.cdiv(inputs, launch.inputs)
    wanted = min(max(1, launch.programs // tiles), turns, LARGEST_SPLIT)
    each = triton.cdiv(turns, wanted)
    return triton.cdiv(turns, each), each


def small(
    x: Scaled, matrix: Fp8Matrix, bias: torch.Tensor | None, out: torch.Tensor, launch: Small, exact: bool = False
) -> None:
    """Outputs of all tokens into out [T, outputs]. Any T; made for few. exact: see PROMOTE."""
    outputs, inputs = matrix.values.shape
    tokens = x.values.shape[0]
    tile = min(LARGEST_SMALL, max(16, triton.next_power_of_2(tokens)))
    split, turns = splits(outputs, inputs, tokens, tile, launch)
    grid = (triton.cdiv(outputs, launch.outputs), triton.cdiv(tokens, tile), split)
    if split > 1 and grid[0] * grid[1] > matrix.counters.numel():
        split, turns, grid = 1, triton.cdiv(inputs, launch.inputs), (grid[0], grid[1], 1)
    room = split * grid[0] * grid[1] * launch.outputs * tile if split > 1 else 0
    part = torch.empty(room, dtype=torch.float32, device=out.device) if room else matrix.scales
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
        SHARED=split > 1,
        WHOLE=inputs % launch.inputs == 0,
        PROMOTE=0 if exact else min(PROMOTED, launch.inputs),
        TOKENS=tile,
        OUTPUTS=launch.outputs,
        INPUTS=launch.inputs,
        num_warps=launch.warps,
        num_stages=launch.stages,
        **overlap(out.device),
    )


def pack(values: torch.Tensor, scales: torch.Tensor) -> Fp8Matrix:
    """The matrix as it is, and a counter for each of its output tiles."""
    tiles = triton.cdiv(values.shape[0], SMALLEST_OUTPUTS)
    return Fp8Matrix(values, scales, torch.zeros(tiles, dtype=torch.int32, device=values.device))


def _large(x: Scaled, matrix: Fp8Matrix, bias: torch.Tensor | None, fast: bool = True) -> torch.Tensor:
    """cuBLAS, in bfloat16; inputs and outputs in sixteens. fast: sums in the tensor core's own precision."""
    return torch._scaled_mm(
        x.values,
        matrix.values.t(),
        scale_a=x.scales.unsqueeze(1),
        scale_b=matrix.scales.unsqueeze(0),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


def _vector_for(x: Activation, outputs: int, inputs: int) -> Vector:
    """A plain x is quantized by every program, which must see all of it at once."""
    if inputs > WIDEST_VECTOR:
        return LONG_VECTOR
    return VECTORS[outputs > WIDE and isinstance(x, Scaled)]


def _small_for(tokens: int, outputs: int) -> Small | None:
    """The launch for so many tokens; None: more than the small product is good for."""
    if tokens > LARGEST_SMALL:
        return None
    return SMALL[max(16, triton.next_power_of_2(tokens))][outputs > WIDE]


def linear(x: Activation, matrix: Fp8Matrix, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """See reference.fp8_linear."""
    outputs, inputs = matrix.values.shape
    tokens = (x.values if isinstance(x, Scaled) else x).shape[0]
    if not isinstance(x, Scaled) and (tokens != 1 or inputs > WIDEST_VECTOR):
        x = quantize(x)
    launch = _small_for(tokens, outputs)
    if isinstance(x, Scaled) and launch is None and dtype == torch.bfloat16 and not (outputs | inputs) % 16:
        return _large(x, matrix, bias)
    out = torch.empty((tokens, outputs), dtype=dtype, device=matrix.values.device)
    if tokens == 1:
        vector(x, matrix, bias, out, _vector_for(x, outputs, inputs))
    elif tokens:
        assert isinstance(x, Scaled)
        small(x, matrix, bias, out, launch or _MANY)
    return out


FP8_TRITON = Fp8Ops(
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    activate=activate,
    pack=pack,
    linear=linear,
)
