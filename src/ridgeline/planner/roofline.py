"""Where each operation of a step stands under the roof of an accelerator: FLOPs, bytes, intensity, what binds it, time.

Roofline: Williams, Waterman, Patterson 2009. Times are floors of the specification, not predictions of a machine; those
come from `core.cost` and its calibration and are printed beside them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ridgeline.core.operations import Operation, operations
from ridgeline.core.spec import ModelSpec
from ridgeline.hardware.table import Accelerator

_MATRICES = frozenset({"qkv", "out", "gate+up", "down"})
_MATH = {"fp8": "float8_e4m3"}
"""Precision that the matrices of a number format are multiplied in, where it is not the model's dtype."""


@dataclass(frozen=True, slots=True)
class Point:
    """One kind of operation of a phase, all its runs together, as if it ran alone.

    bytes: of weights, keys and values, which no kernel can avoid. activation_bytes: what comes in and goes out beside them.
    peak: operations per second of the precision it computes in. seconds: the larger of arithmetic and traffic.
    """

    name: str
    count: int
    flops: int
    bytes: int
    activation_bytes: int
    peak: float
    bandwidth: float

    @property
    def moved(self) -> int:
        """All bytes that cross the memory bus."""
        return self.bytes + self.activation_bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved."""
        return self.flops / self.moved if self.moved else 0.0

    @property
    def bound(self) -> str:
        """ "compute" or "memory"."""
        return "compute" if self.flops / self.peak > self.moved / self.bandwidth else "memory"

    @property
    def seconds(self) -> float:
        return max(self.flops / self.peak, self.moved / self.bandwidth)

    @property
    def attained(self) -> float:
        """FLOP/s at the roof for this intensity."""
        return self.flops / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Phase:
    """One step, operation by operation. name: "prefill" or "decode"; tokens: query tokens of the step."""

    name: str
    tokens: int
    points: tuple[Point, ...]

    @property
    def flops(self) -> int:
        return sum(one.flops for one in self.points)

    @property
    def bytes(self) -> int:
        """Unavoidable bytes; activations that fusion keeps on the chip are left out."""
        return sum(one.bytes for one in self.points)

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def serial_s(self) -> float:
        """Seconds when the operations run one after the other, each at its own roof."""
        return sum(one.seconds for one in self.points)

    @property
    def floor_s(self) -> float:
        """Seconds below which nothing gets on this device: all arithmetic overlaps all unavoidable traffic."""
        compute = sum(one.flops / one.peak for one in self.points)
        return max(compute, sum(one.bytes / one.bandwidth for one in self.points))

    @property
    def bound(self) -> str:
        """What binds the step as a whole: "compute" or "memory"."""
        compute = sum(one.flops / one.peak for one in self.points)
        return "compute" if compute > sum(one.bytes / one.bandwidth for one in self.points) else "memory"


@dataclass(frozen=True, slots=True)
class Load:
    """What is looked at: `batch` sequences that decode behind `context` tokens each, and one prompt of `prompt` tokens."""

    batch: int = 1
    context: int = 2048
    prompt: int = 2048


@dataclass(frozen=True, slots=True)
class Capacity:
    """Whether weights and cache of a load fit. Bytes; spilled: what lies in the host's memory and is read over its link at
    every step. spill_s: seconds that takes, infinite where there is no link."""

    weight_bytes: int
    kv_bytes: int
    memory_bytes: int
    spilled_bytes: int
    spill_s: float

    @property
    def fits(self) -> bool:
        return self.spilled_bytes == 0


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model on an accelerator. ridge: FLOPs per byte above which its matrices are bound by arithmetic."""

    spec: ModelSpec
    accelerator: Accelerator
    load: Load
    phases: tuple[Phase, ...]
    capacity: Capacity

    @property
    def ridge(self) -> float:
        return self.accelerator.ridge(matrix_dtype(self.spec))

    def phase(self, name: str) -> Phase:
        return next(one for one in self.phases if one.name == name)

    @property
    def decode_slowdown(self) -> float:
        """How many times longer a decode step takes because of what lies in the host's memory (FlexGen, Sheng et al. 2023:
        the link is read beside the device's own memory, the slower of the two decides)."""
        floor = self.phase("decode").serial_s
        return max(floor, self.capacity.spill_s) / floor


def matrix_dtype(spec: ModelSpec) -> str:
    """The precision the layers' matrices are multiplied in. Formats of weights alone multiply in the model's dtype."""
    return _MATH.get(spec.quantization, spec.dtype)


def roofline(spec: ModelSpec, accelerator: Accelerator, load: Load = Load()) -> Roofline:
    """Every operation of a decode step and of a prefill under `accelerator`'s roof.

    Raises ConfigError where the accelerator does not compute in the model's precision.
    """
    decode = phase("decode", spec, accelerator, [(load.context, 1)] * load.batch)
    prefill = phase("prefill", spec, accelerator, [(0, load.prompt)])
    return Roofline(spec, accelerator, load, (prefill, decode), capacity(spec, accelerator, load))


def phase(name: str, spec: ModelSpec, accelerator: Accelerator, shares: Iterable[tuple[int, int]]) -> Phase:
    """One step whose rows run `n` query tokens after `start` cached ones, for (start, n) in shares."""
    rows = list(shares)
    peaks = {True: accelerator.peak(matrix_dtype(spec)), False: accelerator.peak(spec.dtype)}
    points = (_point(one, peaks[one.name in _MATRICES], accelerator.bandwidth) for one in operations(spec, rows))
    return Phase(name, sum(count for _, count in rows), tuple(points))


def capacity(spec: ModelSpec, accelerator: Accelerator, load: Load) -> Capacity:
    """What of weights and cache `accelerator` cannot hold, and what reading that from the host costs each step."""
    weights = spec.weight_bytes
    kv = max(load.batch * spec.kv_bytes(load.context + 1), spec.kv_bytes(load.prompt))
    spilled = max(0, weights + kv - accelerator.memory_bytes)
    link = accelerator.host_link
    seconds = 0.0 if not spilled else spilled / link if link else float("inf")
    return Capacity(weights, kv, accelerator.memory_bytes, spilled, seconds)


def _point(one: Operation, peak: float, bandwidth: float) -> Point:
    return Point(one.name, one.count, one.flops, one.bytes, one.activation_bytes, peak, bandwidth)
