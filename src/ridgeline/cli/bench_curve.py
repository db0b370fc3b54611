"""`ridgeline bench curve`. A module of its own, because the formulas of a model import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rich.console import RenderableType

from ridgeline.bench import show
from ridgeline.bench.efficiency import Limits, point
from ridgeline.bench.options import SHIPPED, CurveConfig
from ridgeline.bench.progress import RunProgress
from ridgeline.bench.report import Outcome
from ridgeline.bench.session import BenchConfig, Session
from ridgeline.cli.roofline import read_spec
from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.resolve import split_options
from ridgeline.hardware.bandwidth import with_measured_rates
from ridgeline.hardware.probe import probe, resolve_accelerator
from ridgeline.hardware.serving import held_on


async def run_curve(
    settings: BenchConfig, progress: RunProgress, options: Mapping[str, Any]
) -> tuple[Outcome, RenderableType]:
    """Measure throughput, latency and efficiency at several concurrencies (closed loop)."""
    names = CurveConfig.__dataclass_fields__
    (values,) = split_options({name: options[name] for name in names if name in options}, CurveConfig, origin="flag")
    config = CurveConfig(**values)
    for name in ("rate", "concurrency"):
        if getattr(settings.load, name) is not None:
            raise ConfigError(f"--levels sets the concurrency of each run: leave --{name} out.", param=name)
    limits = _limits(config)
    runs, points = [], []
    async with Session(settings, options.get("target"), progress) as session:
        for level in _levels(config.levels):
            load = replace(settings.load, rate=None, concurrency=level)
            runs.append(await session.measure(load, label=f"concurrency {level}"))
            points.append(point(runs[-1], limits))
            progress.print_run(runs[-1])
    return Outcome("Curve over concurrency", runs, points=points), show.points_table(points)


def _levels(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError(f"--levels is {text!r}: give whole numbers above 0, as in 1,2,4,8.", param="levels")
    return [int(word) for word in words]


def _limits(config: CurveConfig) -> Limits:
    """Model and device that the options name. A model without a device runs on this machine.

    Raises ConfigError if this machine's device is needed and not in the hardware table.
    """
    device = resolve_accelerator(config.on) if config.on else None
    if not config.model_folder:
        return Limits(None, device, named=bool(config.on))
    if device is None and (device := probe().device().accelerator) is None:
        raise ConfigError("The device of this machine is not in the hardware table: give one with --on.", param="on")
    model = "" if config.model_folder == SHIPPED else config.model_folder
    spec = held_on(read_spec(ModelConfig(model=model)), device.name, device.kind)
    return Limits(spec, with_measured_rates(device, spec.dtype), named=bool(config.on))
