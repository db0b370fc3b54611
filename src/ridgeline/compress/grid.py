"""Quantization grids: integer codes with a scale and a zero point per group of inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ridgeline.core.errors import UnsupportedModel
from ridgeline.quant.format import max_abs

TERNARY = 3
TERNARY_THRESHOLD = 0.7
"""Share of a group's mean magnitude below which a ternary weight is 0 (Li and Liu 2016, Ternary Weight Networks, section 2.1)."""
_SMALLEST_SCALE = 2.0**-14
"""The smallest normal float16. A group of zeros gets this scale, which avoids a division by zero."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The codes and scales of a quantized matrix."""

    bits: int
    """2 to 8."""
    group: int = 0
    """Inputs that share a scale; the last group may be shorter. 0: all inputs of a row."""
    symmetric: bool = True
    """Without zero points: the middle code represents 0."""
    scale_dtype: torch.dtype = torch.float16
    """Type in which scales are stored. Codes are computed with the stored scales."""
    levels: int = 0
    """Number of codes. 0: 2^bits. TERNARY: -1, 0 and 1 times the scale."""

    @property
    def max_code(self) -> int:
        """The largest code."""
        return (self.levels or 1 << self.bits) - 1

    @property
    def middle_code(self) -> int:
        """The code that represents 0 in a symmetric grid."""
        return (self.levels or 1 << self.bits) // 2

    def width(self, d_in: int) -> int:
        """Return the inputs per group in a row of d_in inputs."""
        return self.group or d_in

    def groups(self, d_in: int) -> int:
        """Return the number of groups in a row of d_in inputs."""
        return -(-d_in // self.width(d_in))


@dataclass(frozen=True, slots=True)
class Codes:
    """A quantized matrix: weight[n, k] = (codes[n, k] - zeros[n, g]) * scales[n, g]."""

    grid: Grid
    codes: torch.Tensor
    """uint8 [out, in]."""
    scales: torch.Tensor
    """float32 [out, groups]."""
    zeros: torch.Tensor | None = None
    """uint8 [out, groups]. None: the middle code."""
    g_idx: torch.Tensor | None = None
    """int32 [in], the group g of each input. None: g = k // width."""

    def dequantize(self) -> torch.Tensor:
        """Return the weights, float32 [out, in]."""
        d_in = self.codes.shape[1]
        group = group_index(self.grid, d_in) if self.g_idx is None else self.g_idx.long()
        zeros = float(self.grid.middle_code) if self.zeros is None else self.zeros.float()[:, group]
        return (self.codes.float() - zeros) * self.scales[:, group]

    def to(self, device: torch.device) -> Codes:
        """Copy the codes to another device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        g_idx = None if self.g_idx is None else self.g_idx.to(device)
        return Codes(self.grid, self.codes.to(device), self.scales.to(device), zeros, g_idx)


def group_index(grid: Grid, d_in: int) -> torch.Tensor:
    """Return the group of each input, int64 [in] on the CPU. CPU indices work for tensors of any device."""
    return torch.arange(d_in) // grid.width(d_in)


def fit(low: torch.Tensor, high: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and zero points, float32 in the shape of `low`, of the grid that covers low .. high and 0.

    A symmetric grid has one more step below its middle than above. The scale takes the sign that maps the end with the larger
    magnitude to the lowest code exactly.
    """
    low, high = low.clamp(max=0), high.clamp(min=0)
    if grid.symmetric:
        extreme = torch.where(high > -low, high, low)
        scales = (extreme / -grid.middle_code).to(grid.scale_dtype).float()
        scales = torch.where(scales.abs() < _SMALLEST_SCALE, _SMALLEST_SCALE, scales)
        return scales, torch.full_like(scales, float(grid.middle_code))
    scales = ((high - low) / grid.max_code).clamp(min=_SMALLEST_SCALE).to(grid.scale_dtype).float()
    return scales, (-low / scales).round().clamp(0, grid.max_code)


def nearest_codes(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return the nearest codes as floats."""
    return (values / scales + zeros).round().clamp(0, grid.max_code)


def split_groups(weight: torch.Tensor, grid: Grid) -> list[torch.Tensor]:
    """Split weight [out, in] into its groups, each [out, at most width]."""
    return list(weight.split(grid.width(weight.shape[1]), dim=1))


def fit_members(members: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and zero point of one group of each output, float32 [out] each; members: [out, inputs of the group].

    A grid covers the extremes of the group. The scale of a ternary grid is the mean magnitude of the weights that are not 0.
    """
    if grid.levels != TERNARY:
        return fit(members.amin(1), members.amax(1), grid)
    magnitudes = members.abs()
    kept = magnitudes > TERNARY_THRESHOLD * magnitudes.mean(1, keepdim=True)
    scales = (magnitudes * kept).sum(1) / kept.sum(1).clamp(min=1)
    scales = scales.clamp(min=_SMALLEST_SCALE).to(grid.scale_dtype).float()
    return scales, torch.full_like(scales, float(grid.middle_code))


def fit_groups(weight: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and zero points of every group, float32 [out, groups] each."""
    scales, zeros = zip(*(fit_members(group, grid) for group in split_groups(weight, grid)), strict=True)
    return torch.stack(scales, 1), torch.stack(zeros, 1)


def encode(weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, grid: Grid) -> Codes:
    """Round weight [out, in] to the nearest points of a grid with the given scales and zero points."""
    group = group_index(grid, weight.shape[1])
    codes = nearest_codes(weight, scales[:, group], zeros[:, group], grid).to(torch.uint8)
    return Codes(grid, codes, scales, None if grid.symmetric else zeros.to(torch.uint8))


def round_to_nearest(weight: torch.Tensor, grid: Grid) -> Codes:
    """Round weight [out, in] to the nearest points of the grid that covers the extremes of each group."""
    return encode(weight, *fit_groups(weight, grid), grid)


def check_matrix(name: str, tensor: torch.Tensor) -> None:
    """Raise UnsupportedModel that names the tensor unless it is a matrix of finite floats."""
    if tensor.dim() != 2 or 0 in tensor.shape:
        raise UnsupportedModel(f"tensor {name} cannot be compressed: its shape is {list(tensor.shape)}, not a matrix.")
    if not tensor.is_floating_point():
        raise UnsupportedModel(f"tensor {name} cannot be compressed: it holds {tensor.dtype}, not floats.")
    if not bool(max_abs(tensor) < torch.inf):
        raise UnsupportedModel(f"tensor {name} cannot be compressed: it holds NaN or infinite values.")
