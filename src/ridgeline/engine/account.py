"""FLOPs, bytes, predicted time and energy of each step: the input of MFU, MBU, prediction and energy metrics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ridgeline.core.calibration import load_calibration
from ridgeline.core.cost import CostModel, WorkMeter
from ridgeline.core.spec import NUMBER_FORMATS, ModelSpec
from ridgeline.hardware.bandwidth import measured_rates
from ridgeline.hardware.power import Meter, power_counter
from ridgeline.hardware.probe import probe
from ridgeline.hardware.table import Accelerator


class Accounted(NamedTuple):
    """Account of one step. A tuple, because every step makes one.

    flops, bytes: by the formulas of the model's spec. predicted_s: predicted device seconds. joules: energy since the last
    step that reported energy."""

    flops: float = 0.0
    bytes: float = 0.0
    predicted_s: float = 0.0
    joules: float = 0.0


class Account:
    """The interface, with a default that counts nothing."""

    def step(self, ends: Sequence[int], counts: Sequence[int], logits: int, device_s: float) -> Accounted:
        """Account for a step. ends: tokens of each row after it. counts: how many of them are new. logits: rows of logits."""
        return Accounted()


class DeviceAccount(Account):
    """Counts by the formulas of the spec and the energy counter of the device. cost: the cost model that predicts times."""

    def __init__(self, cost: CostModel, power: Meter) -> None:
        self.cost = cost
        self._meter, self._power = WorkMeter(cost.spec), power

    def step(self, ends: Sequence[int], counts: Sequence[int], logits: int, device_s: float) -> Accounted:
        work = self._meter.work(ends, counts, logits)
        return Accounted(work.flops, work.bytes, self.cost.step_s(work), self._power.take(device_s))


def open_account(spec: ModelSpec, device: torch.device, calibration: str = "") -> tuple[DeviceAccount, dict[str, Any]]:
    """The account of a model on a device, and the ceilings of the device as facts (see metrics.Ceilings).

    Ceilings are the published figures of the device and the rates measured here with simple kernels, in a tenth of a second.

    Args:
        calibration: file for the predictions; "": predict from the ceilings.
    Raises:
        ConfigError: for a file of another model, number format or device.
    """
    fitted = load_calibration(Path(calibration), spec, place(device)) if calibration else None
    cuda = device.type == "cuda"
    machine = probe()
    known = machine.device("auto" if cuda else "cpu").accelerator
    form = NUMBER_FORMATS.get(spec.quantization)
    measured, read = measured_rates(device, getattr(torch, spec.dtype))
    power = Meter(power_counter(device.type, known.watts if known else 0.0, device.index or 0))
    ceilings = {
        "measured_bytes": read,
        # Quantized matrix products have another rate, which this measurement does not show.
        "measured_flops": measured if form is None else 0.0,
        "power": power.kind,
        "calibration": str(fitted or ""),
        **(_published(known, spec) if known else {}),
    }
    guess = CostModel(spec, ceilings.get("flops") or measured, ceilings.get("bytes") or read)
    return DeviceAccount(fitted.cost if fitted else guess, power), ceilings


def place(device: torch.device) -> str:
    """The device name of a calibration: "NVIDIA H200", or a processor and torch's thread count ("AMD EPYC, 2 threads")."""
    name = probe().device("auto" if device.type == "cuda" else "cpu").name
    return name if device.type == "cuda" else f"{name}, {torch.get_num_threads()} threads"


def _published(known: Accelerator, spec: ModelSpec) -> dict[str, Any]:
    """Published or derived figures; 0: unknown (see hardware.processor). They give no share then, only the measured ones do."""
    precision = "float8_e4m3" if spec.quantization == "fp8" else spec.dtype
    return {
        "device": known.name,
        "flops": known.peak(precision) if known.flops else 0.0,
        "bytes": known.memory.bandwidth,
        "price": known.rent.usd if known.rent else 0.0,
    }
