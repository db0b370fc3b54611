"""The shape of a matrix product, and the product by the first kernel that serves it. The kernels' entries: kernels.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ridgeline.ops.triton.registry import Registry


class ProductShape(NamedTuple):
    """All that the choice of a kernel depends on: a product of x [tokens, k] with a weight [n, k], and what is part of it.

    n: of gate and up together where they are merged. dtype: of x; out: of the result. aligned: the copy engine can address x and
    the weight. norm: x is normed by the product. kind: activation of gate and up, part of the product; None: none. add: the result
    is added to a stream. bits, group: of integer weights; inputs of one scale.
    """

    tokens: int
    n: int
    k: int
    dtype: torch.dtype
    out: torch.dtype
    device: torch.device
    aligned: bool
    norm: bool = False
    kind: str | None = None
    add: bool = False
    bias: bool = False
    bits: int = 0
    group: int = 0

    @property
    def gate(self) -> bool:
        return self.kind is not None


Launch = Callable[[Any, Any, torch.Tensor | None, Any, torch.Tensor | None, str | None], torch.Tensor | None]
"""(x, weight, bias, configuration, stream, kind) -> the product; with a stream, in its memory. None: the operands do not lie as the
kernel needs them, or it cannot be compiled; nothing was done."""


Products = Registry[ProductShape, Launch]
"""Entries for the weights of one number format."""


def multiply(
    registry: Products, shape: ProductShape, x: Any, weight: Any, bias: torch.Tensor | None, stream: torch.Tensor | None
) -> torch.Tensor | None:
    """The product by the first kernel that takes it; None: by none."""
    for launch, config in registry.choices(shape):
        out = launch(x, weight, bias, config, stream, shape.kind)
        if out is not None:
            return out
    return None
