"""What a fit of the cost model to one model on one device found, as a value and as JSON. `planner.calibrate` fits; whoever
predicts reads.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ridgeline.core.cost import CostModel
from ridgeline.core.errors import ConfigError
from ridgeline.core.spec import ModelSpec

FACTORS = (
    "compute_share", "memory_share", "overhead_s", "attention_share", "kv_share", "row_s", "token_s", "launch_s",
    "ramp_tokens", "overlap",
)  # fmt: skip
"""Fields of CostModel that are fitted."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors |predicted - measured| / measured: their median and 90th percentile."""

    median: float
    p90: float

    @classmethod
    def of(cls, errors: Iterable[float]) -> Errors:
        found = sorted(abs(one) for one in errors)
        return cls(statistics.median(found), found[min(len(found) - 1, int(0.9 * len(found)))])


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fitted cost model, where and when it was measured, and its errors.

    fitted: on the steps it was fitted to. unseen: on each step by a fit to all others (leave one out; overlap and ramp,
    which are chosen among a few values, are kept).
    """

    cost: CostModel
    device: str
    date: str
    steps: int
    fitted: Errors
    unseen: Errors

    def __str__(self) -> str:
        """ "2026-11-21, 120 steps, median error 3.1%": what stands beside its predictions."""
        return f"{self.date}, {self.steps} steps, median error {self.unseen.median:.1%}"

    def to_json(self) -> str:
        facts = {
            "device": self.device,
            "date": self.date,
            "model": identity(self.cost.spec),
            "flops_per_s": self.cost.flops_per_s,
            "bytes_per_s": self.cost.bytes_per_s,
            "factors": {name: getattr(self.cost, name) for name in FACTORS},
            "steps": self.steps,
            "fitted_error": asdict(self.fitted),
            "leave_one_out_error": asdict(self.unseen),
        }
        return json.dumps(facts, indent=2) + "\n"


def identity(spec: ModelSpec) -> dict[str, Any]:
    """What of a model its step times depend on."""
    return {
        "architecture": spec.architecture,
        "params": spec.params,
        "layers": len(spec.layers),
        "d_model": spec.d_model,
        "dtype": spec.dtype,
        "quantization": spec.quantization,
    }


def load_calibration(path: Path, spec: ModelSpec, device: str = "") -> Calibration:
    """Read what `Calibration.to_json` wrote. device: where it is to be used, "" to take any.

    Raises ConfigError if it cannot be read, or was measured with another model, number format or device.
    """
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        factors = {name: float(facts["factors"][name]) for name in FACTORS}
        cost = CostModel(spec, facts["flops_per_s"], facts["bytes_per_s"], calibrated=True, **factors)
        errors = (Errors(**facts[name]) for name in ("fitted_error", "leave_one_out_error"))
        found = Calibration(cost, facts["device"], facts["date"], facts["steps"], *errors)
        measured = dict(facts["model"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"Cannot read the calibration {path} ({error}): write one with `ridgeline calibrate`.",
            param="calibration",
        ) from None
    other = [
        f"its {name} is {measured.get(name)!r}, not {value!r}"
        for name, value in identity(spec).items()
        if measured.get(name) != value
    ]
    if device and found.device != device:
        other.append(f"its device is {found.device!r}, not {device!r}")
    if other:
        raise ConfigError(
            f"The calibration {path} belongs to another model or device ({'; '.join(other)}): run `ridgeline calibrate` with this "
            "model on this device, and give the new file.",
            param="calibration",
        )
    return found
