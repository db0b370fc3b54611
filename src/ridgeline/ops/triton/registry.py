"""How the kernel of a product is chosen: entries in order of preference, looked up once per shape. The entries: kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

SHAPES = 4096
"""Shapes of which a registry remembers the choice: a model's weights by numbers of tokens."""


class Shape(NamedTuple):
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


@dataclass(frozen=True, slots=True)
class Entry:
    """One kernel.

    serves(shape) -> its launch configuration, any value but None; None: not this shape, or not on this device.
    measured: where the kernel was measured, and the gain over the next entry that serves (benchmarks/results/ablation.json).
    """

    kernel: str
    serves: Callable[[Shape], Any]
    launch: Launch
    measured: str


class Registry:
    """Entries for the weights of one number format, the preferred first."""

    def __init__(self, *entries: Entry) -> None:
        self.entries = entries
        # Key: the shape. Owner: this registry. Entries are pure functions of shape and device, so nothing is ever invalid.
        self.choices = lru_cache(SHAPES)(self._choices)

    def _choices(self, shape: Shape) -> tuple[tuple[Launch, Any], ...]:
        """(launch, configuration) of all entries that serve a shape."""
        found = ((entry.launch, entry.serves(shape)) for entry in self.entries)
        return tuple((launch, config) for launch, config in found if config is not None)

    def multiply(
        self, shape: Shape, x: Any, weight: Any, bias: torch.Tensor | None, stream: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The product by the first kernel that takes it; None: by none."""
        for launch, config in self.choices(shape):
            out = launch(x, weight, bias, config, stream, shape.kind)
            if out is not None:
                return out
        return None

    def kernel_for(self, shape: Shape) -> tuple[str, Any] | None:
        """(name, configuration) of the first kernel that serves a shape; None: none."""
        found = ((entry.kernel, entry.serves(shape)) for entry in self.entries)
        return next(((kernel, config) for kernel, config in found if config is not None), None)

    def without(self, *kernels: str) -> Registry:
        """The registry without some kernels, for measurements."""
        return Registry(*(entry for entry in self.entries if entry.kernel not in kernels))
