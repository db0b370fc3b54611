"""Roofline of a model on an accelerator: for each operation of prefill and decode, what limits it (compute or memory) and its
shortest possible time; and the predicted time of whole steps.

Reads only config.json. Shortest times follow from the accelerator's specification. Predictions use a calibration (`ridgeline
calibrate`); without one they are marked as uncalibrated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.cli.flags import Given, Parser, check_places, parser_for, whole
from ridgeline.cli.serve import read
from ridgeline.cli.show import bytes_text, count_text
from ridgeline.core.calibration import load_calibration
from ridgeline.core.config import ModelConfig
from ridgeline.core.cost import CostModel, step_work
from ridgeline.core.errors import ConfigError
from ridgeline.core.plural import counted
from ridgeline.core.spec import ModelSpec
from ridgeline.hardware.probe import meant, probe
from ridgeline.hardware.table import Accelerator
from ridgeline.models.build import served_spec
from ridgeline.models.config import read_model
from ridgeline.models.hub import resolve_model
from ridgeline.planner.chart import HEAD, roofline_chart, roofline_page, rows
from ridgeline.planner.cost import usd_per_unit
from ridgeline.planner.roofline import Load, Phase, Roofline, matrix_dtype, roofline
from ridgeline.planner.svg import document, si


def parser() -> Parser:
    found = parser_for("roofline", __doc__ or "", (ModelConfig,))
    load = Load()
    group = found.add_argument_group("workload")
    group.add_argument(
        "--on", metavar="NAME", help="accelerator of the hardware table (H100, L4, mi300x, cpu; default: this machine)"
    )
    group.add_argument("--batch", type=whole, metavar="N", help=f"sequences in a decode step (default: {load.batch})")
    group.add_argument(
        "--context", type=whole, metavar="N", help=f"tokens per sequence in a decode step (default: {load.context})"
    )
    group.add_argument("--prompt", type=whole, metavar="N", help=f"tokens in the prefill step (default: {load.prompt})")
    group.add_argument("--calibration", metavar="FILE", help="file that `ridgeline calibrate` wrote (default: none)")
    group = found.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print JSON instead of tables")
    group.add_argument("--html", metavar="FILE", help="write a self-contained HTML page with chart and tables")
    group.add_argument("--svg", metavar="FILE", help="write the chart as SVG")
    return found


def run(given: Given) -> int:
    resolved = read(given)
    spec = read_spec(resolved.model)
    rest = vars(given.rest)
    check_places(rest, "html", "svg")
    accelerator, word = _accelerator(rest.get("on"))
    load = _load(rest, spec.max_len)
    found = roofline(spec, accelerator, load)
    cost = _cost(spec, accelerator, resolved.engine.calibration)
    steps = {one.name: cost.step_s(step_work(spec, shares(one.name, load))) for one in found.phases}
    told = (*notes(found, cost, steps), *word)
    if "svg" in rest:
        Path(rest["svg"]).write_text(document(roofline_chart(found, steps)), encoding="utf-8")
    if "html" in rest:
        Path(rest["html"]).write_text(roofline_page(found, steps, told), encoding="utf-8")
    if "json" in rest:
        print(json.dumps(facts(found, cost, steps), indent=2))
    else:
        _show(Console(), found, told)
    return 0


def _load(rest: Mapping[str, Any], longest: int) -> Load:
    """The load that is looked at; what was not said is no longer than the model's context of `longest` tokens."""
    usual = Load()
    usual = replace(usual, context=min(usual.context, longest), prompt=min(usual.prompt, longest))
    load = replace(usual, **{name: rest[name] for name in ("batch", "context", "prompt") if name in rest})
    for name, value in asdict(load).items():
        if value < 1:
            raise ConfigError(f"--{name} is {value}: give 1 or more.", param=name)
        if name != "batch" and value > longest:
            raise ConfigError(f"--{name} is {value}: give at most {longest}, the context of the model.", param=name)
    return load


def read_spec(model: ModelConfig) -> ModelSpec:
    """The spec a model would be served with, from its small files alone."""
    folder = resolve_model(replace(model, load_format="dummy"))
    return served_spec(read_model(folder)[0], model)


def shares(phase: str, load: Load) -> list[tuple[int, int]]:
    """(cached, new) tokens of the rows of a phase's step."""
    return [(load.context, 1)] * load.batch if phase == "decode" else [(0, load.prompt)]


def _accelerator(name: str | None) -> tuple[Accelerator, tuple[str, ...]]:
    """A row of the table, and what to say of it where it only stands for this machine."""
    if name is not None and name.lower() != "cpu":
        return meant(name), ()
    machine = probe()
    device = machine.device(name or "auto")
    row = device.accelerator
    if row is None:
        raise ConfigError(f"{device.name} is not in the hardware table: give an accelerator with --on.", param="on")
    if device.kind != "cpu":
        return row, ()
    return row, (f"The row {row.name!r} of the hardware table stands for this processor ({device.name}, "
                 f"{counted(machine.cores, 'core')}); `ridgeline calibrate` measures the real one.",)  # fmt: skip


def _cost(spec: ModelSpec, accelerator: Accelerator, calibration: str) -> CostModel:
    if calibration:
        return load_calibration(Path(calibration), spec).cost
    return CostModel(spec, accelerator.peak(matrix_dtype(spec)), accelerator.bandwidth)


def notes(found: Roofline, cost: CostModel, steps: dict[str, float]) -> tuple[str, ...]:
    """What a reader should know beside the tables, in sentences."""
    load, capacity = found.load, found.capacity
    decode, prefill = found.phase("decode"), found.phase("prefill")
    word = (
        "calibrated" if cost.calibrated else "uncalibrated: a rough estimate; run `ridgeline calibrate` on that machine"
    )
    lines = [
        f"A decode step of {counted(load.batch, 'sequence')} with {counted(load.context, 'token')} each takes at least "
        f"{si(decode.floor_s, 's')}, predicted {si(steps['decode'], 's')} = {load.batch / steps['decode']:,.0f} tokens/s ({word}).",
        f"A prefill of {counted(load.prompt, 'token')} takes at least {si(prefill.floor_s, 's')}, predicted "
        f"{si(steps['prefill'], 's')} = {load.prompt / steps['prefill']:,.0f} tokens/s.",
    ]
    if capacity.fits:
        free = capacity.memory_bytes - capacity.weight_bytes - capacity.kv_bytes
        lines.append(f"Weights {bytes_text(capacity.weight_bytes)} and cache {bytes_text(capacity.kv_bytes)} fit: "
                     f"{bytes_text(free)} are left.")  # fmt: skip
        near = found.accelerator.on_chip
        if near is not None and capacity.weight_bytes <= near.bytes:
            lines.append(
                f"All weights fit into the {near.kind} of {bytes_text(near.bytes)}, which is read at {si(near.bandwidth, 'B/s')}: "
                "steps may be faster than these limits, which assume reads from memory."
            )
    else:
        lines.append(f"The model does not fit (capacity-bound): {bytes_text(capacity.spilled_bytes)} would be in host memory. "
                     + _spilled(found))  # fmt: skip
    rent = found.accelerator.rent
    if rent is not None:
        price = usd_per_unit(rent.usd, load.batch / steps["decode"]) * 1e6
        lines.append(
            f"Rented at ${rent.usd:.2f} an hour ({rent.date}): ${price:.3f} per million output tokens at this load."
        )
    if found.accelerator.unverified:
        lines.append(f"Unverified values in the hardware table: {', '.join(found.accelerator.unverified)}.")
    return tuple(lines)


def _spilled(found: Roofline) -> str:
    if math.isinf(found.capacity.spill_s):
        return "This device cannot read host memory: use a smaller load or a larger device."
    slower = found.decode_slowdown
    if slower < 1.05:
        return f"The transfer takes {si(found.capacity.spill_s, 's')} per step and can overlap with the rest of a decode step."
    return f"Decoding gets {slower:.1f} times slower, because each step reads them over the link."


def facts(found: Roofline, cost: CostModel, steps: dict[str, float]) -> dict[str, Any]:
    """The same as data: bytes, FLOPs and seconds."""
    accelerator = found.accelerator
    return {
        "model": {"architecture": found.spec.architecture, "params": found.spec.params, "dtype": found.spec.dtype,
                  "quantization": found.spec.quantization, "weight_bytes": found.spec.weight_bytes,
                  "kv_bytes_per_token": found.spec.kv_bytes_per_token()},
        "accelerator": {"name": accelerator.name, "peak_flops": accelerator.peak(matrix_dtype(found.spec)),
                        "bandwidth": accelerator.bandwidth, "memory_bytes": accelerator.memory_bytes,
                        "ridge_flop_per_byte": found.ridge, "source": accelerator.source},
        "load": asdict(found.load),
        "fits": found.capacity.fits,
        "spilled_bytes": found.capacity.spilled_bytes,
        "calibrated": cost.calibrated,
        "phases": {one.name: _phase_facts(one, steps[one.name]) for one in found.phases},
    }  # fmt: skip


def _phase_facts(found: Phase, predicted_s: float) -> dict[str, Any]:
    operations = [
        {"name": one.name, "count": one.count, "flops": one.flops, "bytes": one.bytes,
         "activation_bytes": one.activation_bytes, "intensity": one.intensity, "bound": one.bound, "floor_s": one.seconds}
        for one in found.points
    ]  # fmt: skip
    return {"tokens": found.tokens, "flops": found.flops, "bytes": found.bytes, "intensity": found.intensity,
            "bound": found.bound, "floor_s": found.floor_s, "serial_floor_s": found.serial_s, "predicted_s": predicted_s,
            "operations": operations}  # fmt: skip


def _show(console: Console, found: Roofline, told: Sequence[str]) -> None:
    one = found.accelerator
    peak = si(one.peak(matrix_dtype(found.spec)), "FLOP/s")
    console.print(
        f"[bold]{found.spec.architecture}[/bold], {count_text(found.spec.params)} parameters, {found.spec.dtype} on "
        f"[bold]{one.name}[/bold]: {peak} dense, {si(one.bandwidth, 'B/s')}, ridge {found.ridge:.0f} FLOP/B",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    for phase in found.phases:
        title = f"{phase.name}: {counted(phase.tokens, 'token')}, {phase.bound}-bound, {si(phase.intensity, 'FLOP/B')}"
        table = Table(*HEAD, title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for column in table.columns[1:]:
            column.justify = "right"
        for row in rows(phase):
            table.add_row(*row)
        console.print()
        console.print(table)
    console.print()
    for line in told:
        console.print(line, highlight=False, soft_wrap=True)
