"""The Triton operations as one value."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ridgeline.ops.reference import FP8_WEIGHT_REFERENCE
from ridgeline.ops.table import (
    AttentionOps,
    LayerParts,
    MatmulOps,
    Normed,
    Ops,
    Plain,
    PlainOps,
    Programs,
    RunLayers,
    SamplerOps,
    TokenwiseOps,
    plain,
)
from ridgeline.ops.triton import wide
from ridgeline.ops.triton.activation import activate, capped
from ridgeline.ops.triton.attention import attention
from ridgeline.ops.triton.fp8 import FP8_TRITON
from ridgeline.ops.triton.gated import gated_product
from ridgeline.ops.triton.gemm_small import matrix_product
from ridgeline.ops.triton.gemv import resident_product, vector_product
from ridgeline.ops.triton.integer import INT_TRITON
from ridgeline.ops.triton.launch import gluon, is_hopper
from ridgeline.ops.triton.norm import norm_add, rms_norm
from ridgeline.ops.triton.qkv import qkv_write
from ridgeline.ops.triton.ring_shapes import ring_for
from ridgeline.ops.triton.rows import advance, gather, to_host
from ridgeline.ops.triton.sample import draw, sample
from ridgeline.ops.triton.shapes import MatrixTile, ResidentTile, tile_for
from ridgeline.ops.triton.verify import last, verify
from ridgeline.ops.triton.w8a8 import W8A8_TRITON, round_inliers


def pack(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _streams(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernels for few tokens take these: 16-bit numbers whose rows the copy engine can address."""
    return (
        is_hopper(x.device)
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(1) == 1
        and weight.is_contiguous()
        and (x.stride(0) | weight.shape[1]) % 8 == 0
        and (x.data_ptr() | weight.data_ptr()) % 16 == 0
    )


def _streamed(
    x: Plain, weight: torch.Tensor, bias: torch.Tensor | None, stream: torch.Tensor | None, kind: str | None
) -> torch.Tensor | None:
    """A product of few tokens by the kernels that stream the weight, chosen by shape alone, with all of what stands around
    it; None: not in one kernel, or not in one of ours."""
    source = x.x if isinstance(x, Normed) else x
    tokens, k = source.shape
    if not tokens or not _streams(source, weight):
        return None
    ring = None if isinstance(x, Normed) else ring_for(tokens, weight.shape[0], k, kind is not None)
    if ring is not None and (module := gluon(source.device, "ring")) is not None:
        return module.ring_product(source, weight, bias, ring, stream, kind)
    tile = tile_for(tokens, weight.shape[0], k, isinstance(x, Normed), kind is not None)
    if isinstance(tile, ResidentTile):
        return resident_product(x, weight, bias, tile, stream, kind)
    if isinstance(tile, MatrixTile):
        return matrix_product(source, weight, bias, tile, stream, kind)
    return None if tile is None else vector_product(source, weight, bias, tile, stream)


def linear(x: Plain, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See reference.linear. Many tokens, and what the kernels for few do not take: cuBLAS."""
    out = _streamed(x, packed, bias, None, None)
    if out is not None:
        return out
    if isinstance(x, Normed):
        return linear(plain(x, rms_norm), packed, bias)
    return F.linear(x, packed, bias)


def linear_add(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, stream: torch.Tensor) -> torch.Tensor:
    """See reference.linear_add; the result takes the stream's memory."""
    out = _streamed(x, packed, bias, stream, None) if stream.is_contiguous() else None
    if out is not None:
        return out
    if bias is None and wide.added(x, packed, stream):
        return stream
    # A bias is the one summand that cuBLAS takes, the stream the other.
    return stream.addmm_(x, packed.t()) if bias is None else stream.add_(F.linear(x, packed, bias))


def linear_activate(x: Plain, packed: torch.Tensor, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
    """See reference.linear_activate."""
    plainly = kind == "silu" and bias is None
    if plainly and isinstance(x, torch.Tensor) and (out := wide.gated(x, packed)) is not None:
        return out
    out = _streamed(x, packed, bias, None, kind)
    if out is not None:
        return out
    if isinstance(x, Normed):
        return linear_activate(plain(x, rms_norm), packed, bias, kind)
    if plainly and (out := gated_product(x, packed)) is not None:
        return out
    return activate(linear(x, packed, bias), kind)


def layers(parts: Sequence[LayerParts], run: RunLayers) -> RunLayers:
    """See Programs: one kernel for one token of large layers."""
    module = gluon(parts[0].attention_norm.device, "one_token")
    return run if module is None or not module.knows(parts) else module.OneToken(parts, run)


TRITON = Ops(
    name="triton",
    tokenwise=TokenwiseOps(rms_norm, norm_add, activate, cap=capped),
    attention=AttentionOps(qkv_write, attention),
    matmul=MatmulOps(
        plain=PlainOps(pack, linear, linear_add, linear_activate),
        fp8=FP8_TRITON,
        fp8_weight=FP8_WEIGHT_REFERENCE,
        integer=INT_TRITON,
        w8a8=W8A8_TRITON,
        round_inliers=round_inliers,
        without_kernel=frozenset({"fp8_weight"}),
    ),
    sampler=SamplerOps(
        sample=sample, draw=draw, gather=gather, advance=advance, verify=verify, last=last, to_host=to_host
    ),
    programs=Programs(layers=layers),
)
