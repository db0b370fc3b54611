"""Measure steps of this model on this machine and fit the cost model to them, for accurate predictions.

Runs decode steps, prefills and both together in this process (with --load-format dummy a config.json is enough) and
writes the factors with their errors, leave-one-out among them, for `ridgeline serve --calibration` and `ridgeline roofline
--calibration`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from ridgeline.bench.steps import FIT_SHAPES, Bounds, measure, shapes
from ridgeline.cli.flags import Given, Parser, check_places, parser_for, whole
from ridgeline.cli.roofline import read_spec
from ridgeline.cli.serve import read
from ridgeline.cli.show import Stages
from ridgeline.core.calibration import FACTORS, Calibration, Errors
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.cost import CostModel
from ridgeline.core.errors import ConfigError
from ridgeline.core.spec import ModelSpec
from ridgeline.engine.account import place
from ridgeline.engine.local import LocalEngine
from ridgeline.hardware.bandwidth import matmul_rate, read_bandwidth
from ridgeline.hardware.probe import Device, probe
from ridgeline.planner.calibrate import Measured, calibrate
from ridgeline.planner.roofline import matrix_dtype
from ridgeline.planner.svg import si


@dataclass(frozen=True, slots=True)
class Patience:
    """Most tokens of cache that one measured shape may hold: what a slow machine computes in seconds."""

    cpu: int = 6_000
    cuda: int = 110_000


def parser() -> Parser:
    found = parser_for("calibrate", __doc__ or "", (ModelConfig, EngineConfig))
    group = found.add_argument_group("measurement options")
    group.add_argument("--out", metavar="FILE", help="file to write (default: calibration.json)")
    group.add_argument(
        "--repeats", type=whole, metavar="N", help="measurements of each prompt after one warm-up (default: 3)"
    )
    group.add_argument(
        "--most-tokens",
        type=whole,
        metavar="N",
        help="most tokens in the KV cache of a measured step (default: by device)",
    )
    return found


def run(given: Given) -> int:
    rest = vars(given.rest)
    repeats = rest.get("repeats", 3)
    out = rest.get("out", "calibration.json")
    check_places({"out": out}, "out")
    for name, value in (("repeats", repeats), ("most_tokens", rest.get("most_tokens", 1))):
        if value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}: give 1 or more.", param=name)
    if "calibration" in given.flags:
        raise ConfigError(
            "`ridgeline calibrate` writes a calibration and reads none: give --out instead of --calibration.",
            param="calibration",
        )
    resolved = read(given)
    spec = read_spec(resolved.model)
    console = Console(stderr=True)
    with Stages(console) as stages:
        local = LocalEngine.start(resolved.model, replace(resolved.engine, calibration=""), stages)
        try:
            wanted = shapes(FIT_SHAPES, bounds(local, rest.get("most_tokens")))
            steps = measure(local, wanted, repeats, lambda done, total: stages("steps", done, total))
        finally:
            local.close()
    device = probe().device(resolved.engine.device)
    where = place(torch.device(device.kind))
    found = calibrate(guess(spec, device), steps, where, datetime.now(UTC).strftime("%Y-%m-%d"))
    Path(out).write_text(found.to_json(), encoding="utf-8")
    show(Console(), found, steps)
    console.print(f"\n[dim]written to {out}[/dim]", highlight=False)
    return 0


def bounds(local: LocalEngine, most_tokens: int | None) -> Bounds:
    """What this engine's rows, context and cache allow."""
    facts = local.engine.setup.facts
    patience = Patience()
    allowed = most_tokens or (patience.cpu if facts["device"] == "cpu" else patience.cuda)
    room = int(facts["blocks"]) * int(facts["page_tokens"])
    return Bounds(
        facts["max_num_seqs"], min(facts["max_len"], facts["max_request_tokens"]), min(allowed, room * 9 // 10)
    )


def guess(spec: ModelSpec, device: Device) -> CostModel:
    """The uncalibrated model on this device; one that is not in the table is measured instead."""
    row = device.accelerator
    if row is not None:
        return CostModel(spec, row.peak(matrix_dtype(spec)), row.bandwidth)
    place = torch.device(device.kind)
    return CostModel(spec, matmul_rate(place, torch.bfloat16, 4096), read_bandwidth(place, 1 << 30))


def show(console: Console, found: Calibration, steps: list[Measured]) -> None:
    """Each step measured and predicted, the factors, and the errors."""
    table = Table("step", "measured", "predicted", "error", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    for one in steps:
        predicted = found.cost.step_s(one.work(found.cost.spec))
        error = f"{predicted / one.seconds - 1:+.1%}"
        table.add_row(one.label, f"{one.seconds * 1e3:.3f} ms", f"{predicted * 1e3:.3f} ms", error)
    console.print(table)
    console.print()
    factors = ", ".join(f"{name} {_factor(name, getattr(found.cost, name))}" for name in FACTORS)
    console.print(f"[bold]{found.device}[/bold], {found.steps} steps: {factors}", highlight=False, soft_wrap=True)
    console.print(f"error on these steps: {_errors(found.fitted)}; on steps left out of the fit: {_errors(found.unseen)}",
                  highlight=False, soft_wrap=True)  # fmt: skip


def _factor(name: str, value: float) -> str:
    return si(value, "s") if name.endswith("_s") else f"{value:.3g}"


def _errors(found: Errors) -> str:
    return f"median {found.median:.1%}, 90th percentile {found.p90:.1%}"
