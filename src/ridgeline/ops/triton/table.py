"""The Triton operations as one value."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ridgeline.ops.table import Ops
from ridgeline.ops.triton.activation import activate
from ridgeline.ops.triton.attention import attention
from ridgeline.ops.triton.norm import add_rms_norm, rms_norm
from ridgeline.ops.triton.qkv import qkv_write


def pack(weight: torch.Tensor) -> torch.Tensor:
    return weight


def linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """cuBLAS."""
    return F.linear(x, packed, bias)


TRITON = Ops(
    name="triton",
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    qkv_write=qkv_write,
    attention=attention,
    activate=activate,
    pack=pack,
    linear=linear,
)
