"""What the layers of a decoder are built from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F

from ridgeline.core.spec import ModelSpec
from ridgeline.ops.step import StepInputs
from ridgeline.ops.table import Activation, Normed, Ops, Scaled, apply_norm
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

    def norm(self) -> torch.Tensor:
        """Uninitialized norm of the residual stream: weight [d_model], or weight and bias [2, d_model]."""
        vector = self.vector(self.spec.norm_vectors * self.spec.d_model)
        return vector.view(2, -1) if self.spec.norm_vectors == 2 else vector

    def normed(self, x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor | Normed:
        """A norm of the stream x [T, d_model], as a linear takes it. None: the stream itself."""
        spec = self.spec
        if norm is None:
            return x
        if spec.norm == "rms":
            return Normed(x, norm, spec.norm_eps, spec.norm_offset)
        weight, bias = norm if norm.dim() == 2 else (norm, None)
        return F.layer_norm(x, weight.shape, weight, bias, spec.norm_eps)


Input = TypeVar("Input", bound=Activation)


def gather(build: Build) -> Callable[[Input, StepInputs], Input | torch.Tensor]:
    """(input of a linear, step) -> the input of all tokens, gathered if this rank has a part of the residual stream. The norm runs
    on that part."""
    ranks, rms_norm = build.mesh.stream, build.ops.tokenwise.rms_norm

    def gathered(x: Input, step: StepInputs) -> Input | torch.Tensor:
        if isinstance(x, Scaled):
            return x
        if step.division is not None:
            return step.division.joined(ranks.all_gather(apply_norm(x, rms_norm)))
        if len(x.x if isinstance(x, Normed) else x) == step.inputs:
            return x
        return ranks.all_gather(apply_norm(x, rms_norm)).flatten(0, 1)[: step.inputs]

    return gathered


def sum_terms(mesh: Mesh, x: torch.Tensor, stream: torch.Tensor, step: StepInputs) -> torch.Tensor:
    """Sum of x [T, d_model] over the ranks, for the tokens of this rank's stream [P, d_model]: [P, d_model]."""
    if step.division is None:
        return mesh.sum_rows(x, len(stream))
    return mesh.exchange(step.division.parts(x)).sum(0)
