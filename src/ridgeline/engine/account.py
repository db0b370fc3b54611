"""What a step had to do, was expected to take and used: the figures behind MFU, MBU, predictions and energy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ridgeline.core.calibration import load_calibration
from ridgeline.core.cost import CostModel, WorkMeter
from ridgeline.core.spec import NUMBER_FORMATS, ModelSpec
from ridgeline.hardware.bandwidth import matmul_rate, read_bandwidth
from ridgeline.hardware.power import Meter, power_counter
from ridgeline.hardware.probe import probe
from ridgeline.hardware.table import Accelerator

GPU_PRODUCT, CPU_PRODUCT = 8192, 1024
"""Sizes of the product that shows what a device can multiply."""
GPU_BYTES, CPU_BYTES = 1 << 29, 1 << 27
"""Bytes that are read to see what its memory gives: many times its caches."""


class Accounted(NamedTuple):
    """A tuple, because one is made in every step.

    flops, bytes: by the model's formula. predicted_s: device seconds expected. joules: since the
    last step that has some."""

    flops: float = 0.0
    bytes: float = 0.0
    predicted_s: float = 0.0
    joules: float = 0.0


class Account:
    """By itself it counts nothing."""

    def step(self, ends: Sequence[int], counts: Sequence[int], logits: int, device_s: float) -> Accounted:
        """A step after which rows hold `ends` tokens, `counts` of them new, with logits for `logits` tokens."""
        return Accounted()


class DeviceAccount(Account):
    """Counts by the spec's formulas and the device's own energy counter. cost: what predicts, for whoever else must."""

    def __init__(self, cost: CostModel, power: Meter) -> None:
        self.cost = cost
        self._meter, self._power = WorkMeter(cost.spec), power

    def step(self, ends: Sequence[int], counts: Sequence[int], logits: int, device_s: float) -> Accounted:
        work = self._meter.work(ends, counts, logits)
        return Accounted(work.flops, work.bytes, self.cost.step_s(work), self._power.take(device_s))


def open_account(spec: ModelSpec, device: torch.device, calibration: str = "") -> tuple[DeviceAccount, dict[str, Any]]:
    """The account of a model on a device, and the device's ceilings as facts (see metrics.Ceilings): by the table, and as
    plain kernels reach them here, which takes a tenth of a second. calibration: file that its predictions follow, "" for
    a guess by the ceilings. Raises ConfigError for a file of another model, number format or device."""
    fitted = load_calibration(Path(calibration), spec, place(device)) if calibration else None
    cuda = device.type == "cuda"
    machine = probe()
    known = machine.device("auto" if cuda else "cpu").accelerator
    form = NUMBER_FORMATS.get(spec.quantization)
    dtype = getattr(torch, spec.dtype)
    measured = matmul_rate(device, dtype, GPU_PRODUCT if cuda else CPU_PRODUCT, 3)
    read = read_bandwidth(device, GPU_BYTES if cuda else CPU_BYTES, 3)
    if cuda:
        torch.cuda.empty_cache()
    power = Meter(power_counter(device.type, known.watts if known else 0.0, device.index or 0))
    ceilings = {
        "measured_bytes": read,
        # Products of a quantized model have another rate, which this product does not show.
        "measured_flops": measured if form is None else 0.0,
        "power": power.kind,
        "calibration": str(fitted or ""),
        **(_published(known, spec) if known else {}),
    }
    guess = CostModel(spec, ceilings.get("flops") or measured, ceilings.get("bytes") or read)
    return DeviceAccount(fitted.cost if fitted else guess, power), ceilings


def place(device: torch.device) -> str:
    """What a calibration holds for: "NVIDIA H200", or a processor with as many threads as torch has ("AMD EPYC, 2 threads")."""
    name = probe().device("auto" if device.type == "cuda" else "cpu").name
    return name if device.type == "cuda" else f"{name}, {torch.get_num_threads()} threads"


def _published(known: Accelerator, spec: ModelSpec) -> dict[str, Any]:
    precision = "float8_e4m3" if spec.quantization == "fp8" else spec.dtype
    return {
        "device": known.name,
        "flops": known.peak(precision),
        "bytes": known.memory.bandwidth,
        "price": known.rent.usd if known.rent else 0.0,
    }
