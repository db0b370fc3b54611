"""Which kernel multiplies what on a GPU: for each number format of the weights the kernels in order of preference.

An entry says which shapes a kernel serves, on which hardware, and with which configuration. Tables of configurations are data in
shapes, ring_shapes, integer_shapes and fp8_shapes. What no entry serves is multiplied by cuBLAS through torch (linears).
Attention has such entries too: attention. Which decoders run one token through all layers in one kernel: one_token.knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ridgeline.ops.table import FloatInput, Fp8Matrix, IntMatrix, Normed, Scaled
from ridgeline.ops.triton import cuda, fp8, fp8_vector, integer_stream, pairs, w8a8, wide
from ridgeline.ops.triton.fp8_shapes import (
    INT_VECTOR,
    MANY,
    VECTOR,
    large_for,
    resident_for,
    small_for,
)
from ridgeline.ops.triton.gated import gated_product
from ridgeline.ops.triton.gemm_small import _arrivals, matrix_product
from ridgeline.ops.triton.gemv import resident_product, vector_product
from ridgeline.ops.triton.integer_shapes import IntRingTile, IntStreamTile, IntVectorTile, stream_for, vector_for
from ridgeline.ops.triton.integer_shapes import ring_for as integer_ring_for
from ridgeline.ops.triton.integer_vector import integer_vector_product
from ridgeline.ops.triton.launch import gluon, is_hopper
from ridgeline.ops.triton.products import Launch, Products, ProductShape
from ridgeline.ops.triton.registry import Entry, Registry
from ridgeline.ops.triton.ring_shapes import RingTile, ring8_for, ring_for
from ridgeline.ops.triton.shapes import MatrixTile, ResidentTile, Tile, VectorTile, tile_for

HALVES = (torch.bfloat16, torch.float16)
Bias = torch.Tensor | None
Stream = torch.Tensor | None


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


# --- weights in floating point ----------------------------------------------------------------------------------------


def _streams(shape: ProductShape) -> bool:
    """Whether the kernels for few tokens run: 16-bit numbers that the copy engine addresses, on Hopper."""
    return shape.tokens > 0 and shape.aligned and shape.dtype in HALVES and is_hopper(shape.device)


def _tile(shape: ProductShape, kind: type[Tile]) -> Tile | None:
    tile = tile_for(shape.tokens, shape.n, shape.k, shape.norm, shape.gate) if _streams(shape) else None
    return tile if isinstance(tile, kind) else None


def _ring_serves(shape: ProductShape) -> RingTile | None:
    tile = ring_for(shape.tokens, shape.n, shape.k, shape.gate) if _streams(shape) and not shape.norm else None
    return None if tile is None or gluon(shape.device, "ring") is None else tile


def _ring(x: torch.Tensor, weight: torch.Tensor, bias: Bias, tile: RingTile, stream: Stream, kind: str | None) -> Any:
    module = gluon(x.device, "ring")
    return None if module is None else module.ring_product(x, weight, bias, tile, stream, kind)


def _gate_alone(shape: ProductShape) -> bool:
    """Of kernels in CUDA C++ that apply the activation to gate times up."""
    return shape.kind in ("silu", "gelu_tanh") and not shape.bias and not shape.norm and shape.dtype == torch.bfloat16


def _wide_gates_serves(shape: ProductShape) -> wide.Plan | None:
    """Above wide.EVEN tokens, cuBLAS and the activation kernel are as fast with GeGLU."""
    most = wide.FULL * 2 if shape.kind == "silu" else wide.EVEN
    return (
        wide.plan_for(shape.tokens, shape.n // 2, shape.k, True)
        if shape.tokens <= most and _gate_alone(shape)
        else None
    )


def _wide_sums_serves(shape: ProductShape) -> wide.Plan | None:
    sums = shape.add and not shape.bias and shape.dtype == torch.bfloat16
    return wide.plan_for(shape.tokens, shape.n, shape.k, False) if sums else None


def _gated_serves(shape: ProductShape) -> bool | None:
    enough = shape.tokens >= pairs.FEWEST and shape.k >= pairs.FEWEST_INPUTS
    return True if enough and shape.kind == "silu" and _gate_alone(shape) else None


PLAIN: Products = Registry(
    Entry(
        "wide (gates)",
        _wide_gates_serves,
        lambda x, weight, bias, plan, stream, kind: wide.gated(x, weight, plan, kind),  # type: ignore[arg-type]
        "17 to 256 tokens, Hopper; +2.5 % of a step of an 8B at 96 rows, +3.4 % of a 7B at 128, of a 4B +3 % at 64",
    ),
    Entry("ring", _ring_serves, _ring, "2 to 256 tokens, Hopper; +5.0 % of an 8B at 4 rows, +18.5 % of a 0.6B at 64"),
    Entry(
        "resident",
        lambda shape: _tile(shape, ResidentTile),
        resident_product,
        "1 token, its norm inside, Hopper; +75 % of a 0.6B, +10 % of a 9B of Gemma, of which the norm is 7 % of the first",
    ),
    Entry(
        "vector",
        lambda shape: _tile(shape, VectorTile),
        lambda x, weight, bias, tile, stream, kind: vector_product(x, weight, bias, tile, stream),
        "1 to 4 tokens, Hopper; measured with resident",
    ),
    Entry(
        "matrix",
        lambda shape: _tile(shape, MatrixTile),
        matrix_product,
        "65 to 128 tokens, Hopper; not measured in the engine",
    ),
    Entry(
        "wide (sums)",
        _wide_sums_serves,
        lambda x, weight, bias, plan, stream, kind: stream if wide.added(x, weight, stream, plan) else None,  # type: ignore[arg-type]
        "65 to 240 tokens, Hopper; measured with gates",
    ),
    Entry(
        "gated",
        _gated_serves,
        lambda x, weight, bias, config, stream, kind: gated_product(x, weight),
        "1,536 tokens and more, Hopper; +3.5 % of a prompt of 8,192 tokens of a 1B, +2.0 % of an 8B",
    ),
)


# --- weights in integers ----------------------------------------------------------------------------------------------


def _integer_serves(shape: ProductShape) -> bool:
    return shape.tokens > 0 and shape.dtype in HALVES and _on_gpu(shape.device)


def _stream_serves(shape: ProductShape) -> IntStreamTile | None:
    """A register of codes has one scale."""
    if not _integer_serves(shape) or not shape.aligned or not is_hopper(shape.device) or not cuda.available():
        return None
    width, group = (8 if shape.bits == 8 else 4), (shape.group if shape.group < shape.k else 0)
    if math.gcd(group, integer_stream.SMALLEST_STEP) % (128 // width):
        return None
    return stream_for(shape.tokens, shape.n, shape.k, shape.gate, shape.bits, shape.group)


def _integer_rings(shape: ProductShape) -> bool:
    return shape.aligned and gluon(shape.device, "integer_ring") is not None


def _integer_vector_serves(shape: ProductShape) -> IntVectorTile | None:
    """With several tokens each program would norm every token by itself; streams want the norm done before."""
    apart = shape.norm and (shape.tokens > 1 or _stream_serves(shape) is not None)
    if not _integer_serves(shape) or apart:
        return None
    return vector_for(shape.tokens, shape.n, shape.k, shape.bits, _integer_rings(shape))


def _integer_ring_serves(shape: ProductShape) -> IntRingTile | None:
    if not _integer_serves(shape) or shape.norm or not _integer_rings(shape):
        return None
    return integer_ring_for(shape.tokens, shape.n, shape.k, shape.gate, shape.bits)


def _integer_vector(
    x: FloatInput, matrix: IntMatrix, bias: Bias, tile: IntVectorTile, stream: Stream, kind: str | None
) -> torch.Tensor | None:
    source = x.x if isinstance(x, Normed) else x
    return integer_vector_product(x, matrix, bias, tile, stream, kind) if source.stride(1) == 1 else None


def _integer_ring(
    x: torch.Tensor, matrix: IntMatrix, bias: Bias, tile: IntRingTile, stream: Stream, kind: str | None
) -> Any:
    module = gluon(x.device, "integer_ring")
    return None if module is None else module.integer_ring_product(x, matrix, bias, tile, stream, kind)


INTEGER: Products = Registry(
    Entry(
        "integer_stream",
        lambda shape: None if shape.norm else _stream_serves(shape),
        integer_stream.integer_stream_product,
        "1 to 32 tokens, of gate and up to 64, Hopper; +15.1 % of an 8B in int4 at 2 rows, +4.0 % at 32",
    ),
    Entry(
        "integer_vector",
        _integer_vector_serves,
        _integer_vector,
        "1 token, up to 4 where no ring runs; the only kernel of few tokens where neither stream nor ring runs",
    ),
    Entry(
        "integer_ring",
        _integer_ring_serves,
        _integer_ring,
        "up to 1,024 tokens, Hopper; +73 % of an 8B in int4 at 64 rows, +104 % at 128, +26 % of a prompt of 512 tokens",
    ),
)


# --- both sides in 8 bits ---------------------------------------------------------------------------------------------


class _Into(NamedTuple):
    """A configuration, and what a kernel writes: [tokens, n] of the type `out`."""

    launch: Any
    n: int
    out: torch.dtype


def _into(shape: ProductShape, launch: Any) -> _Into | None:
    return None if launch is None else _Into(launch, shape.n, shape.out)


def _quantized(shape: ProductShape) -> bool:
    """Whether a product of quantized inputs, without an activation, is asked for."""
    return shape.tokens > 0 and shape.dtype.itemsize == 1 and not shape.gate


def _fp8_vector_serves(shape: ProductShape) -> ResidentTile | None:
    supported = (
        shape.dtype in HALVES and shape.tokens == 1 and shape.aligned and fp8_vector.has_shared_memory(shape.device)
    )
    if not supported or shape.k > fp8_vector.WIDEST or shape.k % fp8_vector.ALIGNED:
        return None
    return resident_for(shape.n, shape.k)


def _ring8_serves(shape: ProductShape) -> _Into | None:
    if shape.dtype.itemsize > 1 or not shape.aligned or shape.out not in HALVES:
        return None
    tile = ring8_for(shape.tokens, shape.n, shape.k, shape.gate)
    return None if gluon(shape.device, "ring") is None else _into(shape, tile)


def _cublas_serves(shape: ProductShape) -> bool | None:
    many = _quantized(shape) and small_for(shape.tokens, shape.n) is None
    return True if many and shape.out == torch.bfloat16 and not (shape.n | shape.k) % 16 else None


def _ring8(x: Scaled, matrix: Fp8Matrix, bias: Bias, config: _Into, stream: Stream, kind: str | None) -> Any:
    module = gluon(matrix.values.device, "ring")
    if module is None:
        return None
    return module.ring_product(x, matrix, bias, config.launch, config.out if stream is None else stream, kind)


def _writing(run: Callable[..., None]) -> Launch:
    """The launch of a kernel that writes into memory it is given, or adds to what is there."""

    def launch(x: Scaled, matrix: Any, bias: Bias, config: _Into, stream: Stream, kind: str | None) -> torch.Tensor:
        out = stream
        if out is None:
            out = torch.empty((len(x.values), config.n), dtype=config.out, device=x.values.device)
        run(x, matrix, bias, out, config.launch, stream is not None)
        return out

    return launch


FP8: Products = Registry(
    Entry(
        "fp8_vector",
        _fp8_vector_serves,
        fp8_vector.product,
        "1 token that is quantized on the way, Hopper; +12.2 % of a 0.6B, +5.0 % of a 9B of Gemma",
    ),
    Entry("ring", _ring8_serves, _ring8, "2 to 128 tokens, Hopper; +13.4 % of an 8B at 2 and 16 rows, +8.4 % at 64"),
    Entry(
        "cublas",
        _cublas_serves,
        lambda x, matrix, bias, config, stream, kind: fp8.large(x, matrix, bias, stream),
        "more than 128 tokens; joining the stream is +5.1 % of a prompt of 2,048 tokens of an 8B",
    ),
    Entry(
        "vector",
        lambda shape: _into(shape, VECTOR) if _quantized(shape) and shape.tokens == 1 else None,
        _writing(fp8.vector),
        "1 token that fp8_vector does not take; no other kernel",
    ),
    Entry(
        "small",
        lambda shape: _into(shape, small_for(shape.tokens, shape.n) or MANY) if _quantized(shape) else None,
        _writing(fp8.small),
        "2 tokens and more where no ring runs; no other kernel",
    ),
)


def _as_fp8(launch: Launch) -> Launch:
    """A launch for integers of one that asks a matrix for nothing but 8-bit values, scales and counters."""

    def launch_as_fp8(x: Scaled, matrix: IntMatrix, bias: Bias, config: Any, stream: Stream, kind: str | None) -> Any:
        codes = matrix.codes.view(torch.int8)
        weight = Fp8Matrix(codes, matrix.scales.view(-1), _arrivals(codes.device))
        return launch(x, weight, bias, config, stream, kind)

    return launch_as_fp8


W8A8: Products = Registry(
    Entry("ring", _ring8_serves, _as_fp8(_ring8), "2 to 128 tokens, Hopper; as of fp8"),
    Entry(
        "vector",
        lambda shape: _into(shape, INT_VECTOR) if _quantized(shape) and shape.tokens == 1 else None,
        _writing(w8a8.vector),
        "1 token; no other kernel",
    ),
    Entry(
        "small",
        lambda shape: _into(shape, small_for(shape.tokens, shape.n)) if _quantized(shape) else None,
        _as_fp8(_writing(fp8.small)),
        "2 to 128 tokens where no ring runs; no other kernel",
    ),
    Entry(
        "large",
        lambda shape: _into(shape, large_for(shape.tokens, shape.n)) if _quantized(shape) else None,
        _writing(w8a8.large),
        "more than 128 tokens; no other kernel",
    ),
)
