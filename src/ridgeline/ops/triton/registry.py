"""How a kernel is chosen: entries in order of preference, looked up once per shape. Entries of products: kernels.py; of
attention: attention.py."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

SHAPES = 4096
"""Shapes of which a registry remembers the choice: a model's weights by numbers of tokens, or steps by rows and query tokens."""
S = TypeVar("S", bound=Hashable)
"""A shape: all that the choice depends on."""
L = TypeVar("L")
"""How the chosen kernel is launched."""


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
