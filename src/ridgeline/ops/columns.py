"""Matrices that consist of columns of others: parts side by side, and a part alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ridgeline.ops.table import FloatInput, Normed, RmsNorm, TokenwiseOps, apply_norm


def norm_then_place(rms_norm: RmsNorm) -> Callable[[FloatInput, torch.Tensor], None]:
    """TokenwiseOps.place as two operations."""

    def place(x: FloatInput, out: torch.Tensor) -> None:
        out.copy_(apply_norm(x, rms_norm))

    return place


def joined(ops: TokenwiseOps, parts: Sequence[FloatInput]) -> torch.Tensor:
    """The parts [T, ..] side by side, each normed if it is Normed."""
    tensors = [part.x if isinstance(part, Normed) else part for part in parts]
    widths = [tensor.shape[1] for tensor in tensors]
    out = tensors[0].new_empty(len(tensors[0]), sum(widths))
    for part, place in zip(parts, out.split(widths, 1), strict=True):
        ops.place(part, place)
    return out


def columns(ops: TokenwiseOps, x: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Columns of x [T, D], contiguous; x itself if these are all."""
    if end - begin == x.shape[1]:
        return x
    out = x.new_empty(len(x), end - begin)
    ops.place(x[:, begin:end], out)
    return out
