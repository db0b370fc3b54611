"""Roofline of each operation of a step: FLOPs, bytes, arithmetic intensity, limit, time.

Times are lower bounds from the specification of the accelerator. Predictions come from `core.cost` and its calibration.
Source: Williams, Waterman, Patterson 2009.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ridgeline.core.operations import Operation, operations
from ridgeline.core.spec import ModelSpec
from ridgeline.hardware.table import Accelerator

_MATRICES = frozenset({"qkv", "out", "gate+up", "down"})
_MATH = {"fp8": "float8_e4m3"}
"""Precision of matrix products by weight format, if it differs from the dtype of the model."""


@dataclass(frozen=True, slots=True)
class Point:
    """One kind of operation in a phase; figures are sums over all its runs."""

    name: str
    count: int
    """Number of runs."""
    flops: int
    bytes: int
    """Bytes of weights, keys and values, which every kernel must read."""
    activation_bytes: int
    """Bytes of inputs and outputs."""
    peak: float
    """Peak FLOP/s in the precision of the operation."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""

    @property
    def total_bytes(self) -> int:
        """All bytes that move between memory and chip."""
        return self.bytes + self.activation_bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte of memory traffic."""
        return self.flops / self.total_bytes if self.total_bytes else 0.0

    @property
    def bound(self) -> str:
        """ "compute" or "memory"."""
        return "compute" if self.flops / self.peak > self.total_bytes / self.bandwidth else "memory"

    @property
    def seconds(self) -> float:
        """Lower bound of the time: the larger of compute time and memory time."""
        return max(self.flops / self.peak, self.total_bytes / self.bandwidth)

    @property
    def attained(self) -> float:
        """FLOP/s on the roof at this intensity."""
        return self.flops / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Phase:
    """One step, operation by operation."""

    name: str
    """Either "prefill" or "decode"."""
    tokens: int
    """Query tokens of the step."""
    points: tuple[Point, ...]

    @property
    def flops(self) -> int:
        return sum(point.flops for point in self.points)

    @property
    def bytes(self) -> int:
        """Bytes that no kernel can avoid. Activations are left out, because fusion can keep them on the chip."""
        return sum(point.bytes for point in self.points)

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def serial_s(self) -> float:
        """Seconds if the operations run one after the other, each at its own roof."""
        return sum(point.seconds for point in self.points)

    @property
    def floor_s(self) -> float:
        """Lower bound in seconds on this device: all compute overlaps all unavoidable memory traffic."""
        compute = sum(point.flops / point.peak for point in self.points)
        return max(compute, sum(point.bytes / point.bandwidth for point in self.points))

    @property
    def bound(self) -> str:
        """Limit of the step: "compute" or "memory"."""
        compute = sum(point.flops / point.peak for point in self.points)
        return "compute" if compute > sum(point.bytes / point.bandwidth for point in self.points) else "memory"


@dataclass(frozen=True, slots=True)
class Load:
    """Workload: `batch` sequences that decode after `context` tokens each, and one prompt of `prompt` tokens."""

    batch: int = 1
    context: int = 2048
    prompt: int = 2048


@dataclass(frozen=True, slots=True)
class Capacity:
    """Memory that weights and KV cache of a load need."""

    weight_bytes: int
    kv_bytes: int
    memory_bytes: int
    """Memory of the device."""
    spilled_bytes: int
    """Bytes that do not fit and are read from host memory in every step."""
    spill_s: float
    """Seconds per step for reading them; infinite if the device has no host link."""

    @property
    def fits(self) -> bool:
        return self.spilled_bytes == 0


@dataclass(frozen=True, slots=True)
class Roofline:
    """Roofline of a model on an accelerator."""

    spec: ModelSpec
    accelerator: Accelerator
    load: Load
    phases: tuple[Phase, ...]
    capacity: Capacity

    @property
    def ridge(self) -> float:
        """Arithmetic intensity (FLOP/B) above which matrix products are compute-bound."""
        return self.accelerator.ridge(matrix_dtype(self.spec))

    def phase(self, name: str) -> Phase:
        return next(phase for phase in self.phases if phase.name == name)

    @property
    def decode_slowdown(self) -> float:
        """Slowdown of a decode step by reads from host memory.

        Reads over the host link overlap reads from device memory; the slower of the two determines the time.
        Source: FlexGen (Sheng et al. 2023).
        """
        floor = self.phase("decode").serial_s
        return max(floor, self.capacity.spill_s) / floor


def matrix_dtype(spec: ModelSpec) -> str:
    """Precision of the matrix products. Weight-only formats multiply in the dtype of the model."""
    return _MATH.get(spec.quantization, spec.dtype)


def roofline(spec: ModelSpec, accelerator: Accelerator, load: Load = Load()) -> Roofline:
    """Roofline of a decode step and of a prefill.

    Raises ConfigError if the accelerator does not support the precision of the model.
    """
    decode = phase("decode", spec, accelerator, [(load.context, 1)] * load.batch)
    prefill = phase("prefill", spec, accelerator, [(0, load.prompt)])
    return Roofline(spec, accelerator, load, (prefill, decode), capacity(spec, accelerator, load))


def phase(name: str, spec: ModelSpec, accelerator: Accelerator, rows: Iterable[tuple[int, int]]) -> Phase:
    """Roofline of one step. rows: (cached, new) tokens of each row."""
    rows = list(rows)
    peaks = {True: accelerator.peak(matrix_dtype(spec)), False: accelerator.peak(spec.dtype)}
    points = (
        _point(operation, peaks[operation.name in _MATRICES], accelerator.bandwidth)
        for operation in operations(spec, rows)
    )
    return Phase(name, sum(count for _, count in rows), tuple(points))


def capacity(spec: ModelSpec, accelerator: Accelerator, load: Load) -> Capacity:
    """Bytes that do not fit into the memory of `accelerator`, and the time for reading them from the host in each step."""
    weights = spec.weight_bytes
    kv = max(load.batch * spec.kv_bytes(load.context + 1), spec.kv_bytes(load.prompt))
    spilled = max(0, weights + kv - accelerator.memory_bytes)
    link = accelerator.host_link
    seconds = 0.0 if not spilled else spilled / link if link else float("inf")
    return Capacity(weights, kv, accelerator.memory_bytes, spilled, seconds)


def _point(operation: Operation, peak: float, bandwidth: float) -> Point:
    return Point(
        operation.name, operation.count, operation.flops, operation.bytes, operation.activation_bytes, peak, bandwidth
    )
