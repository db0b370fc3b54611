"""The Triton operations as one value."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from ridgeline.ops.table import Ops
from ridgeline.ops.triton.activation import activate
from ridgeline.ops.triton.attention import attention
from ridgeline.ops.triton.fp8 import FP8_TRITON
from ridgeline.ops.triton.gemm_small import matrix_product
from ridgeline.ops.triton.gemv import vector_product
from ridgeline.ops.triton.norm import add_rms_norm, rms_norm
from ridgeline.ops.triton.qkv import qkv_write
from ridgeline.ops.triton.rows import advance, gather
from ridgeline.ops.triton.sample import sample
from ridgeline.ops.triton.shapes import VectorTile, tile_for


def pack(weight: torch.Tensor) -> torch.Tensor:
    return weight


@cache
def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _streams(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernels for few tokens take these: 16-bit numbers whose rows the copy engine can address."""
    return (
        _hopper(x.device)
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(1) == 1
        and weight.is_contiguous()
        and (x.stride(0) | weight.shape[1]) % 8 == 0
        and (x.data_ptr() | weight.data_ptr()) % 16 == 0
    )


def linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Few tokens: kernels that stream the weight, chosen by shape alone. Many, and what those do not take: cuBLAS."""
    tokens, k = x.shape
    tile = tile_for(tokens, packed.shape[0], k) if tokens and _streams(x, packed) else None
    if tile is None:
        return F.linear(x, packed, bias)
    if isinstance(tile, VectorTile):
        return vector_product(x, packed, bias, tile)
    return matrix_product(x, packed, bias, tile)


TRITON = Ops(
    name="triton",
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    qkv_write=qkv_write,
    attention=attention,
    activate=activate,
    pack=pack,
    linear=linear,
    sample=sample,
    gather=gather,
    advance=advance,
    fp8=FP8_TRITON,
)
