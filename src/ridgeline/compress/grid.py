"""The grid that quantized weights lie on: whole numbers, with a scale and a zero point per group of inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ridgeline.core.errors import UnsupportedModel
from ridgeline.quant.format import max_abs

_SMALLEST_SCALE = 2.0**-14
"""Smallest normal float16: a group of zeros gets this scale, so that nothing is divided by zero."""


@dataclass(frozen=True, slots=True)
class Grid:
    """bits: 2 to 8. group: inputs that share a scale, 0 for all of a row; the last group may be shorter. symmetric: no
    zero points, the middle code stands for 0. scale_dtype: in which scales are stored; codes are made for stored scales.
    """

    bits: int
    group: int = 0
    symmetric: bool = True
    scale_dtype: torch.dtype = torch.float16

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    def width(self, d_in: int) -> int:
        """Inputs of a group in a row of d_in."""
        return self.group or d_in

    def groups(self, d_in: int) -> int:
        return -(-d_in // self.width(d_in))


@dataclass(frozen=True, slots=True)
class Codes:
    """A quantized matrix: weight[n, k] = (codes[n, k] - zeros[n, g]) * scales[n, g].

    codes: uint8 [out, in]. scales: float32 [out, groups]. zeros: uint8 [out, groups], None: the grid's middle everywhere.
    g_idx: int32 [in], the group g of each input; None: g = k // width.
    """

    grid: Grid
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    g_idx: torch.Tensor | None = None

    def dequantize(self) -> torch.Tensor:
        """The weights, float32 [out, in]."""
        d_in = self.codes.shape[1]
        place = group_index(self.grid, d_in) if self.g_idx is None else self.g_idx.long()
        zeros = float(self.grid.middle) if self.zeros is None else self.zeros.float()[:, place]
        return (self.codes.float() - zeros) * self.scales[:, place]

    def to(self, device: torch.device) -> Codes:
        """The same on another device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        g_idx = None if self.g_idx is None else self.g_idx.to(device)
        return Codes(self.grid, self.codes.to(device), self.scales.to(device), zeros, g_idx)


def group_index(grid: Grid, d_in: int) -> torch.Tensor:
    """Group of each input, int64 [in], on the CPU, from where it may index on any device."""
    return torch.arange(d_in) // grid.width(d_in)


def fit(low: torch.Tensor, high: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points, float32 like `low`, of the grid that covers low .. high (0 is always on it).

    A symmetric grid reaches one step further below its middle than above. Its scale has the sign that puts the larger end
    there, exactly, so that no step is lost.
    """
    low, high = low.clamp(max=0), high.clamp(min=0)
    if grid.symmetric:
        end = torch.where(high > -low, high, low)
        scales = (end / -grid.middle).to(grid.scale_dtype).float()
        scales = torch.where(scales.abs() < _SMALLEST_SCALE, _SMALLEST_SCALE, scales)
        return scales, torch.full_like(scales, float(grid.middle))
    scales = ((high - low) / grid.top).clamp(min=_SMALLEST_SCALE).to(grid.scale_dtype).float()
    return scales, (-low / scales).round().clamp(0, grid.top)


def snap(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The nearest codes, as floats."""
    return (values / scales + zeros).round().clamp(0, grid.top)


def spans(weight: torch.Tensor, grid: Grid) -> list[torch.Tensor]:
    """The groups of weight [out, in], each [out, at most width]."""
    return list(weight.split(grid.width(weight.shape[1]), dim=1))


def ranges(weight: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points of every group by its extremes, float32 [out, groups] each."""
    parts = spans(weight, grid)
    low = torch.stack([one.amin(1) for one in parts], 1)
    high = torch.stack([one.amax(1) for one in parts], 1)
    return fit(low, high, grid)


def encode(weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, grid: Grid) -> Codes:
    """Round weight [out, in] to the nearest points of the given grid."""
    place = group_index(grid, weight.shape[1])
    codes = snap(weight, scales[:, place], zeros[:, place], grid).to(torch.uint8)
    return Codes(grid, codes, scales, None if grid.symmetric else zeros.to(torch.uint8))


def round_to_nearest(weight: torch.Tensor, grid: Grid) -> Codes:
    """Every weight [out, in] to its nearest point, the grid spanned by each group's extremes."""
    return encode(weight, *ranges(weight, grid), grid)


def refuse_odd(name: str, tensor: torch.Tensor) -> None:
    """Raise UnsupportedModel naming a tensor that is no matrix of finite numbers."""
    if tensor.dim() != 2 or 0 in tensor.shape:
        raise UnsupportedModel(f"tensor {name} cannot be compressed: its shape is {list(tensor.shape)}, not a matrix.")
    if not tensor.is_floating_point():
        raise UnsupportedModel(f"tensor {name} cannot be compressed: it holds {tensor.dtype}, not floats.")
    if not bool(max_abs(tensor) < torch.inf):
        raise UnsupportedModel(f"tensor {name} cannot be compressed: it holds NaN or infinite values.")
