"""The result of fitting the cost model to one model on one device, as a value and as JSON. `planner.calibrate` makes the fit."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.core.cost import CostModel
from ridgeline.core.errors import ConfigError
from ridgeline.core.host_weights import HostTimes
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
        magnitudes = sorted(abs(error) for error in errors)
        return cls(statistics.median(magnitudes), magnitudes[min(len(magnitudes) - 1, int(0.9 * len(magnitudes)))])


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fitted cost model, where and when it was measured, and its errors.

    fitted: errors on the steps of the fit. unseen: errors on each step, predicted by a fit of the same factors to all other steps
    (leave one out). intervals: 90 % interval of each fitted factor. The steps do not determine the other factors, which keep
    their defaults. Empty in files that were written before intervals existed.
    """

    cost: CostModel
    device: str
    date: str
    steps: int
    fitted: Errors
    unseen: Errors
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __str__(self) -> str:
        """ "2026-11-21, 120 steps, median error 3.1%", printed next to predictions."""
        return f"{self.date}, {self.steps} steps, median error {self.unseen.median:.1%}"

    def to_json(self) -> str:
        content = {
            "device": self.device,
            "date": self.date,
            "model": identity(self.cost.spec),
            **cost_values(self.cost),
            "intervals": {name: [_finite(low), _finite(high)] for name, (low, high) in self.intervals.items()},
            "steps": self.steps,
            "fitted_error": asdict(self.fitted),
            "leave_one_out_error": asdict(self.unseen),
        }
        return json.dumps(content, indent=2) + "\n"


def cost_values(cost: CostModel) -> dict[str, Any]:
    """The rates and factors of a cost model as JSON values. Factors that equal another one (None) are left out."""
    factors = {name: _finite(value) for name in FACTORS if (value := getattr(cost, name)) is not None}
    rates = {"flops_per_s": cost.flops_per_s, "bytes_per_s": cost.bytes_per_s, "expert_s": cost.expert_s}
    host = {name: _finite(value) for name, value in asdict(cost.host).items()}
    return {**rates, "host": host, "factors": factors}


def read_cost(spec: ModelSpec, values: Mapping[str, Any], calibrated: bool = False) -> CostModel:
    """The cost model of `cost_values`. Raises KeyError, TypeError or ValueError for other values."""
    factors: dict[str, Any] = {name: float(value) for name, value in values["factors"].items()}
    times = {name: float(value) for name, value in values.get("host", {}).items()}
    host = HostTimes(**{**times, "few_tokens": int(times.get("few_tokens", 0))})  # type: ignore[arg-type]
    factors["expert_s"] = float(values.get("expert_s", 0.0))
    return CostModel(spec, values["flops_per_s"], values["bytes_per_s"], calibrated=calibrated, host=host, **factors)


def _finite(value: float) -> float | str:
    """The value for JSON, which has no infinity; `float` reads "inf"."""
    return "inf" if value == math.inf else value


def identity(spec: ModelSpec) -> dict[str, Any]:
    """The properties of a model that its step times depend on."""
    return {
        "architecture": spec.architecture,
        "params": spec.params,
        "layers": len(spec.layers),
        "d_model": spec.d_model,
        "dtype": spec.dtype,
        "quantization": spec.quantization,
    }


def read_calibration(path: Path, spec: ModelSpec) -> tuple[Calibration, dict[str, Any]]:
    """The JSON of `Calibration.to_json` for a model, and the properties of the model that it was measured with. Raises ConfigError
    if the file cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        cost = read_cost(spec, content, calibrated=True)
        fitted, unseen = (Errors(**content[name]) for name in ("fitted_error", "leave_one_out_error"))
        intervals = {name: (float(low), float(high)) for name, (low, high) in content.get("intervals", {}).items()}
        made = Calibration(cost, content["device"], content["date"], content["steps"], fitted, unseen, intervals)
        return made, dict(content["model"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"Cannot read the calibration {path} ({error}): write one with `ridgeline calibrate`.",
            param="calibration",
        ) from None


def load_calibration(path: Path, spec: ModelSpec, device: str = "") -> Calibration:
    """Read the JSON of `Calibration.to_json`.

    device: the device to predict for; "" accepts any. Raises ConfigError if the file cannot be read, or was measured with another
    model, number format or device.
    """
    calibration, measured = read_calibration(path, spec)
    mismatches = [
        f"its {name} is {measured.get(name)!r}, not {value!r}"
        for name, value in identity(spec).items()
        if measured.get(name) != value
    ]
    if device and calibration.device != device:
        mismatches.append(f"its device is {calibration.device!r}, not {device!r}")
    if mismatches:
        raise ConfigError(
            f"The calibration {path} belongs to another model or device ({'; '.join(mismatches)}): run `ridgeline calibrate` with "
            "this model on this device, and give the new file.",
            param="calibration",
        )
    return calibration
