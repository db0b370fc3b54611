"""What the layers of a decoder are built from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ridgeline.core.spec import ModelSpec
from ridgeline.ops.table import Ops
from ridgeline.parallel.mesh import Mesh
from ridgeline.quant.format import WeightFormat


@dataclass(frozen=True, slots=True)
class Build:
    """Arguments for building a layer: spec, operations, format of the linears, mesh, dtype, device."""

    spec: ModelSpec
    ops: Ops
    form: WeightFormat
    mesh: Mesh
    dtype: torch.dtype
    device: torch.device

    def vector(self, size: int) -> torch.Tensor:
        """Uninitialized weight of a norm."""
        return torch.empty(size, dtype=self.dtype, device=self.device)
