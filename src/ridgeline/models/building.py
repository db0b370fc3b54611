"""What the layers of a decoder are built from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from ridgeline.core.spec import ModelSpec
from ridgeline.ops.step import StepInputs
from ridgeline.ops.table import Activation, Normed, Ops, apply_norm
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


Input = TypeVar("Input", bound=Activation)


def gather(build: Build) -> Callable[[Input, StepInputs], Input | torch.Tensor]:
    """(input of a linear, step) -> the input of all tokens, gathered if this rank has a part of the residual stream. The norm runs
    on that part."""
    ranks, rms_norm = build.mesh.stream, build.ops.tokenwise.rms_norm

    def gathered(x: Input, step: StepInputs) -> Input | torch.Tensor:
        if not isinstance(x, Normed) or len(x.x) == step.inputs:
            return x
        return ranks.all_gather(apply_norm(x, rms_norm)).flatten(0, 1)[: step.inputs]

    return gathered
