"""What a device can reach: published and measured peak rates, the cost model that follows from them, and its energy counter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ridgeline.core.calibration import load_calibration
from ridgeline.core.cost import CostModel
from ridgeline.core.host_weights import HostTimes, streamed_s
from ridgeline.core.spec import NUMBER_FORMATS, ModelSpec
from ridgeline.hardware.bandwidth import host_link_rate, measured_rates
from ridgeline.hardware.power import Meter, power_counter
from ridgeline.hardware.probe import probe
from ridgeline.hardware.serving import with_experts
from ridgeline.hardware.table import Accelerator


def read_ceilings(
    spec: ModelSpec, device: torch.device, calibration: str = ""
) -> tuple[CostModel, Meter, dict[str, Any]]:
    """The cost model of a served model on a device, the energy meter, and the ceilings as facts (see metrics.Ceilings).

    Ceilings are the published figures of the device and the rates measured here with simple kernels, in a tenth of a second. Where
    weights stay in host memory, the rate of copies is measured, too: every step waits for them.

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
        **(published(known, spec) if known else {}),
    }
    rates = ceilings.get("flops") or measured, ceilings.get("bytes") or read
    guess = with_experts(CostModel(spec, *rates), device.type)
    cost = fitted.cost if fitted else guess
    if spec.host_bytes:
        ceilings["host_link"] = host_link_rate(device)
        cost = replace(cost, host=HostTimes(streamed_s(spec, ceilings["host_link"])))
    return cost, power, ceilings


def place(device: torch.device) -> str:
    """The device name of a calibration: "NVIDIA H200", or a processor and torch's thread count ("AMD EPYC, 2 threads")."""
    name = probe().device("auto" if device.type == "cuda" else "cpu").name
    return name if device.type == "cuda" else f"{name}, {torch.get_num_threads()} threads"


def published(known: Accelerator, spec: ModelSpec) -> dict[str, Any]:
    """Published or derived figures in the precision of the model's matrix products; 0: unknown (see hardware.processor). They give
    no share then, only the measured ones do."""
    return {
        "device": known.name,
        "flops": known.peak(spec.matrix_dtype) if known.flops else 0.0,
        "bytes": known.memory.bandwidth,
        "price": known.rent.usd if known.rent else 0.0,
    }
