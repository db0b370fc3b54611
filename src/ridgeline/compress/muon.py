"""The Muon optimizer: momentum updates are orthogonalized and scaled to the update size of AdamW.

Sources: Jordan et al. 2024, "Muon: an optimizer for hidden layers"; Liu et al. 2025, "Muon is scalable for LLM training",
section 2.2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Approximate U V^T of each matrix with singular value decomposition U S V^T by a quintic Newton-Schulz iteration.

    matrices: [n, rows, columns].
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    transposed = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if transposed else matrices
    x = x.bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if transposed else x


class Muon:
    """Optimizer that updates all matrices of one shape together. `lr` may change between steps."""

    def __init__(self, matrices: Iterable[Tensor], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        groups: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for matrix in matrices:
            groups[matrix.shape].append(matrix)
        self.groups = list(groups.values())
        self.velocity = [torch.zeros(len(group), *group[0].shape, device=group[0].device) for group in self.groups]
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay

    @torch.no_grad()
    def step(self) -> None:
        for group, velocity in zip(self.groups, self.velocity, strict=True):
            gradient = torch.stack([matrix.grad for matrix in group if matrix.grad is not None])
            velocity.lerp_(gradient, 1 - self.momentum)
            update = orthogonalize(gradient.lerp(velocity, self.momentum)).float()
            scale = 0.2 * max(group[0].shape) ** 0.5
            torch._foreach_mul_(group, 1 - self.lr * self.weight_decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-self.lr * scale)
