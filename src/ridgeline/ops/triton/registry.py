"""How a kernel is chosen: entries in order of preference, looked up once per shape. The entries: kernels (products), attention."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import triton

from ridgeline.ops.triton import tuning

SHAPES = 4096
"""Shapes of which a registry remembers the choice: a model's weights by numbers of tokens, or steps by rows and query tokens."""
S = TypeVar("S", bound=Hashable)
"""A shape: all that the choice depends on."""
L = TypeVar("L")
"""How the chosen kernel is launched."""


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


class AttentionShape(NamedTuple):
    """All that the choice of attention's kernels depends on: a step's rows, the heads, and how keys and values lie.

    max_query: most query tokens of a row. long: some row may hold more than step.SHORT slots. dtype: of queries; cache: of keys and
    values. window, softcap: see KvView. in_order: queries see slots in order; neither draft trees nor compacted slots. aligned: the
    copy engine can address queries and cache; asked where rows may be chunks.
    """

    rows: int
    max_query: int
    long: bool
    heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: torch.dtype
    cache: torch.dtype
    device: torch.device
    processors: int
    window: int | None = None
    softcap: float | None = None
    in_order: bool = True
    aligned: bool = False
    lse_needed: bool = False

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def width(self) -> int:
        """Head size, padded."""
        return max(16, triton.next_power_of_2(self.head_dim))

    @property
    def programs(self) -> int:
        """Of the split kernel, if no row is split."""
        return self.rows * self.kv_heads

    @property
    def few(self) -> bool:
        """Whether the split kernel attends for all rows."""
        return self.max_query * self.group <= tuning.LARGER_SPLIT_QUERIES[-1]

    @property
    def small(self) -> int:
        """Packed queries (tokens times heads of a group) up to which a row is the split kernel's. Not the exact number: each would
        be a kernel of its own."""
        small = self.group if self.max_query == 1 else max(tuning.SPLIT_QUERIES, self.group)
        packed = self.max_query * self.group
        return tuning.class_of(packed, tuning.LARGER_SPLIT_QUERIES) if self.few and packed > small else small


@dataclass(frozen=True, slots=True)
class Entry(Generic[S, L]):
    """One kernel, or one form of it.

    serves(shape) -> its launch configuration, any value but None; None: not this shape, or not on this device.
    measured: where the kernel was measured, and the gain over the next entry that serves (benchmarks/results/ablation.json).
    """

    kernel: str
    serves: Callable[[S], Any]
    launch: L
    measured: str


class Registry(Generic[S, L]):
    """Entries that serve one purpose, the preferred first."""

    def __init__(self, *entries: Entry[S, L]) -> None:
        self.entries = entries
        # Key: the shape. Owner: this registry. Entries are pure functions of shape and device, so nothing is ever invalid.
        self.choices = lru_cache(SHAPES)(self._choices)

    def _choices(self, shape: S) -> tuple[tuple[L, Any], ...]:
        """(launch, configuration) of all entries that serve a shape."""
        served = ((entry.launch, entry.serves(shape)) for entry in self.entries)
        return tuple((launch, config) for launch, config in served if config is not None)

    def kernel_for(self, shape: S) -> tuple[str, Any] | None:
        """(name, configuration) of the first kernel that serves a shape; None: none."""
        served = ((entry.kernel, entry.serves(shape)) for entry in self.entries)
        return next(((kernel, config) for kernel, config in served if config is not None), None)

    def without(self, *kernels: str) -> Registry[S, L]:
        """The registry without some kernels, for measurements. It has chosen for no shape yet."""
        return Registry(*(entry for entry in self.entries if entry.kernel not in kernels))


Products = Registry[Shape, Launch]
"""Entries for the weights of one number format."""


def multiply(
    registry: Products, shape: Shape, x: Any, weight: Any, bias: torch.Tensor | None, stream: torch.Tensor | None
) -> torch.Tensor | None:
    """The product by the first kernel that takes it; None: by none."""
    for launch, config in registry.choices(shape):
        out = launch(x, weight, bias, config, stream, shape.kind)
        if out is not None:
            return out
    return None
