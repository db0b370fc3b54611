"""Roofline of each operation of a step: FLOPs, bytes, arithmetic intensity, limit, time.

Times are lower bounds from the specification of the accelerator. Predictions come from `core.cost` and its calibration.
Source: Williams, Waterman, Patterson 2009.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ridgeline.core.host_weights import copy_s, host_weights
from ridgeline.core.operations import Operation, operations
from ridgeline.core.spec import ModelSpec
from ridgeline.hardware.table import Accelerator

_MATRICES = frozenset({"qkv", "out", "gate+up", "down"})


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
    spill_s: float = 0.0
    """Seconds for reading what does not fit into device memory over the host link; infinite without a link. Such reads overlap
    reads from device memory and compute, so the slowest of the three determines the time. Source: FlexGen (Sheng et al. 2023)."""

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
        return max(sum(point.seconds for point in self.points), self.spill_s)

    @property
    def floor_s(self) -> float:
        """Lower bound in seconds on this device: compute, unavoidable memory traffic and reads over the host link overlap."""
        return max(seconds for _, seconds in self._limits)

    @property
    def bound(self) -> str:
        """Limit of the step: "compute", "memory", or "capacity" if reads over the host link take longest."""
        return max(self._limits, key=lambda limit: limit[1])[0]

    @property
    def _limits(self) -> tuple[tuple[str, float], ...]:
        return (
            ("memory", sum(point.bytes / point.bandwidth for point in self.points)),
            ("compute", sum(point.flops / point.peak for point in self.points)),
            ("capacity", self.spill_s),
        )


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
    """Bytes that do not fit and are read from host memory in every decode step."""
    spill_s: float
    """Seconds per decode step for reading them; infinite if the device has no host link."""

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
        return self.accelerator.ridge(self.spec.matrix_dtype)

    def phase(self, name: str) -> Phase:
        return next(phase for phase in self.phases if phase.name == name)

    @property
    def decode_slowdown(self) -> float:
        """Slowdown of a decode step by reads from host memory, see Phase.spill_s."""
        decode = self.phase("decode")
        return decode.serial_s / replace(decode, spill_s=0.0).serial_s


def roofline(spec: ModelSpec, accelerator: Accelerator, load: Load = Load()) -> Roofline:
    """Roofline of a decode step and of a prefill.

    A prefill reads the weights and the cache of its prompt. The cache of other sequences may be in host memory meanwhile.
    Raises ConfigError if the accelerator does not support the precision of the model.
    """
    decode = phase("decode", spec, accelerator, [(load.context, 1)] * load.batch)
    prefill = phase("prefill", spec, accelerator, [(0, load.prompt)])
    room = capacity(spec, accelerator, load)
    prefill_spill = spill(spec.weight_bytes + spec.kv_bytes(load.prompt), accelerator, host_weights(spec).bytes)[1]
    phases = replace(prefill, spill_s=prefill_spill), replace(decode, spill_s=room.spill_s)
    return Roofline(spec, accelerator, load, phases, room)


def phase(name: str, spec: ModelSpec, accelerator: Accelerator, rows: Iterable[tuple[int, int]]) -> Phase:
    """Roofline of one step. rows: (cached, new) tokens of each row."""
    rows = list(rows)
    peaks = {True: accelerator.peak(spec.matrix_dtype), False: accelerator.peak(spec.dtype)}
    points = (
        _point(operation, peaks[operation.name in _MATRICES], accelerator.bandwidth)
        for operation in operations(spec, rows)
    )
    return Phase(name, sum(count for _, count in rows), tuple(points))


def capacity(spec: ModelSpec, accelerator: Accelerator, load: Load) -> Capacity:
    """Memory that `load` needs on `accelerator`, and the part that does not fit."""
    weights = spec.weight_bytes
    kv = max(load.batch * spec.kv_bytes(load.context + 1), spec.kv_bytes(load.prompt))
    return Capacity(weights, kv, accelerator.memory_bytes, *spill(weights + kv, accelerator, host_weights(spec).bytes))


def spill(needed_bytes: int, accelerator: Accelerator, host_bytes: int = 0) -> tuple[int, float]:
    """(bytes in host memory, seconds for reading them over the host link): `host_bytes` that stay there by --cpu-offload-gb, or
    what does not fit into the memory of `accelerator`."""
    spilled = max(host_bytes, needed_bytes - accelerator.memory_bytes, 0)
    return spilled, copy_s(spilled, accelerator.host_link)


def _point(operation: Operation, peak: float, bandwidth: float) -> Point:
    return Point(
        operation.name, operation.count, operation.flops, operation.bytes, operation.activation_bytes, peak, bandwidth
    )
