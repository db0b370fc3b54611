"""Measure steps of this model on this machine and fit the cost model to them, for accurate predictions.

Runs decode steps, prefills and mixed steps in this process. With --load-format dummy a config.json is enough. Factors that the
steps do not determine keep their defaults. Writes factors, 90 % intervals and errors (also leave-one-out) to a
file for `ridgeline serve --calibration` and `ridgeline roofline --calibration`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from ridgeline.bench.steps import FIT_SHAPES, Bounds, measure, shapes
from ridgeline.cli.flags import Arguments, Parser, check_output_paths, parser_for, whole_number
from ridgeline.cli.roofline import read_spec
from ridgeline.cli.serve import resolve_arguments
from ridgeline.cli.show import Stages
from ridgeline.core.calibration import FACTORS, Calibration, Errors
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.cost import CostModel
from ridgeline.core.errors import ConfigError
from ridgeline.core.plural import counted
from ridgeline.core.spec import ModelSpec
from ridgeline.engine.local import LocalEngine
from ridgeline.hardware.bandwidth import matmul_rate, read_bandwidth, with_measured_rates
from ridgeline.hardware.ceilings import place
from ridgeline.hardware.probe import Device, probe
from ridgeline.hardware.serving import held_on, with_experts
from ridgeline.planner.calibrate import MAX_SHARE, NEEDS, Measured, calibrate
from ridgeline.planner.svg import si


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Maximum tokens in the KV cache of one measured step, so that a slow machine computes it in seconds."""

    cpu: int = 6_000
    cuda: int = 110_000


def parser() -> Parser:
    parser = parser_for("calibrate", __doc__ or "", (ModelConfig, EngineConfig))
    group = parser.add_argument_group("measurement options")
    group.add_argument("--out", metavar="FILE", help="file to write (default: calibration.json)")
    group.add_argument(
        "--repeats", type=whole_number, metavar="N", help="measurements of each prompt after one warm-up (default: 3)"
    )
    group.add_argument(
        "--most-tokens",
        type=whole_number,
        metavar="N",
        help="maximum tokens in the KV cache of a measured step (default: 6000 on a CPU, 110000 on a GPU)",
    )
    return parser


def run(args: Arguments) -> int:
    options = vars(args.options)
    repeats = options.get("repeats", 3)
    out = options.get("out", "calibration.json")
    check_output_paths({"out": out}, "out")
    for name, value in (("repeats", repeats), ("most_tokens", options.get("most_tokens", 1))):
        if value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}: give 1 or more.", param=name)
    if "calibration" in args.flags:
        raise ConfigError(
            "`ridgeline calibrate` writes a calibration and reads none: give --out instead of --calibration.",
            param="calibration",
        )
    resolved = resolve_arguments(args)
    device = probe().device(resolved.engine.device)
    spec = held_on(read_spec(resolved.model), device.name, device.kind)
    if spec.host_bytes:
        raise ConfigError(
            "`ridgeline calibrate` measures steps that copy no weights: leave --cpu-offload-gb out, or give a --quantization with "
            "which the model fits. The copies are added when the calibration is used.",
            param="cpu_offload_gb",
        )
    console = Console(stderr=True)
    with Stages(console) as stages:
        local = LocalEngine.start(resolved.model, replace(resolved.engine, calibration=""), stages)
        try:
            step_shapes = shapes(FIT_SHAPES, bounds(local, options.get("most_tokens")))
            spec = replace(spec, both_forms=local.engine.setup.facts["expanded_bytes"] > 0)
            steps = measure(local, step_shapes, repeats, lambda done, total: stages("steps", done, total))
        finally:
            local.close()
    device_name = place(torch.device(device.kind))
    calibration = calibrate(guess(spec, device), steps, device_name, datetime.now(UTC).strftime("%Y-%m-%d"))
    Path(out).write_text(calibration.to_json(), encoding="utf-8")
    show(Console(), calibration, steps)
    console.print(f"\n[dim]written to {out}[/dim]", highlight=False)
    return 0


def bounds(local: LocalEngine, most_tokens: int | None) -> Bounds:
    """Largest step that the rows, the context and the KV cache of this engine allow."""
    facts = local.engine.setup.facts
    limits = CacheLimits()
    limit = most_tokens or (limits.cpu if facts["device"] == "cpu" else limits.cuda)
    capacity = int(facts["blocks"]) * int(facts["page_tokens"])
    return Bounds(
        facts["max_num_seqs"], min(facts["max_len"], facts["max_request_tokens"]), min(limit, capacity * 9 // 10)
    )


def guess(spec: ModelSpec, device: Device) -> CostModel:
    """Uncalibrated cost model of this device. A device that is not in the hardware table is measured."""
    row = device.accelerator
    if row is not None:
        row = with_measured_rates(row, spec.dtype)
        return with_experts(CostModel(spec, row.peak(spec.matrix_dtype), row.bandwidth), device.kind)
    torch_device = torch.device(device.kind)
    rates = matmul_rate(torch_device, torch.bfloat16, 4096), read_bandwidth(torch_device, 1 << 30)
    return with_experts(CostModel(spec, *rates), device.kind)


def show(console: Console, calibration: Calibration, steps: list[Measured]) -> None:
    """Print measured and predicted time of each step, the factors, and the errors."""
    table = Table("step", "measured", "predicted", "error", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    for step in steps:
        predicted = calibration.cost.step_s(step.work(calibration.cost.spec))
        error = f"{predicted / step.seconds - 1:+.1%}"
        table.add_row(step.label, f"{step.seconds * 1e3:.3f} ms", f"{predicted * 1e3:.3f} ms", error)
    console.print(table)
    console.print()
    console.print(
        f"[bold]{calibration.device}[/bold], {counted(calibration.steps, 'step')}", highlight=False, soft_wrap=True
    )
    _show_factors(console, calibration)
    flops, bandwidth = si(calibration.cost.flops_per_s, "FLOP/s"), si(calibration.cost.bytes_per_s, "B/s")
    peaks = {"compute_share": flops, "attention_share": flops, "memory_share": bandwidth, "kv_share": bandwidth}
    for name, peak in peaks.items():
        if name in calibration.intervals and getattr(calibration.cost, name) > 1:
            console.print(f"{name} is above 1: the peak of {peak} is too low for this machine and model. The fit allows "
                          f"{MAX_SHARE} at most.", highlight=False, soft_wrap=True)  # fmt: skip
    console.print(f"error on these steps: {_errors(calibration.fitted)}; "
                  f"on steps left out of the fit: {_errors(calibration.unseen)}",
                  highlight=False, soft_wrap=True)  # fmt: skip


def _show_factors(console: Console, calibration: Calibration) -> None:
    """Print value and 90 % interval of each fitted factor, and of each other factor the steps that would determine it."""
    table = Table("factor", "value", "90 % interval", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, (low, high) in calibration.intervals.items():
        interval = f"{_factor(name, low)} to {_factor(name, high)}"
        table.add_row(name, _factor(name, getattr(calibration.cost, name)), interval)
    console.print(table)
    for name in FACTORS:
        if name not in calibration.intervals:
            value = _factor(name, getattr(calibration.cost, name))
            console.print(f"{name} {value} is the default, not identified: needs steps with {NEEDS[name]}",
                          highlight=False, soft_wrap=True)  # fmt: skip


def _factor(name: str, value: float) -> str:
    return si(value, "s") if name.endswith("_s") else f"{value:.3g}"


def _errors(errors: Errors) -> str:
    return f"median {errors.median:.1%}, 90th percentile {errors.p90:.1%}"
